"""Building and installing a Horovod that works with current PyTorch and TensorFlow."""

from hvdrecover.install.edits import EDITS, Edit, apply
from hvdrecover.install.environment import HOROVOD_VERSION
from hvdrecover.install.horovod import Installed, install_horovod, source_diff

__all__ = ["EDITS", "HOROVOD_VERSION", "Edit", "Installed", "apply", "install_horovod", "source_diff"]
