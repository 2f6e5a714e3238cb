"""Building and installing a Horovod that works with current PyTorch and TensorFlow."""

from hvdrecover.install.edits import EDITS, Edit, apply
from hvdrecover.install.horovod import Installed, install_horovod, source_diff
from hvdrecover.install.pins import HOROVOD_VERSION

__all__ = ["EDITS", "HOROVOD_VERSION", "Edit", "Installed", "apply", "install_horovod", "source_diff"]
