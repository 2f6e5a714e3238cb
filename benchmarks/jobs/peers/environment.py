"""An environment with the peers that are packages of their own, beside all that this one has."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from hvdrecover import config

DLROVER, LM_RESILIENCY, TORCHFT = "dlrover==0.6.1", "lm-resiliency==0.2.0", "torchft==0.2.0"
RAY = "ray==2.60.0"
RAY_FOLDERS = Path("/tmp/hvdrecover-peer-ray-")  # and more letters; paths of Ray's sockets have to be short
# Without what they require: torch is here, and the rest is not needed on CPUs.
_PACKAGES = (DLROVER, LM_RESILIENCY, TORCHFT, RAY)
_NEEDED = {
    DLROVER: (
        *("psutil", "pynvml", "nvidia-ml-py", "deprecated", "wrapt", "packaging", "requests"),
        *("kubernetes", "tornado", "grpcio"),
    ),
    RAY: (
        *("click", "filelock", "jsonschema", "msgpack", "pyyaml"),
        *("pyarrow", "pandas", "python-dateutil", "six", "tensorboardX"),
    ),
    TORCHFT: (  # which logs through it
        *("opentelemetry-api==1.45.2", "opentelemetry-sdk==1.45.2", "opentelemetry-proto==1.45.2"),
        *(
            "opentelemetry-exporter-otlp-proto-http==1.45.2",
            "opentelemetry-exporter-otlp-proto-common==1.45.2",
        ),
        *("opentelemetry-exporter-otlp-common==0.66b2", "opentelemetry-exporter-http-transport==0.66b2"),
        *("opentelemetry-semantic-conventions==0.66b2", "googleapis-common-protos"),
    ),
}
_INSTALL_SECONDS = 600.0


def python() -> str:
    """Return the Python of the environment, which is made on demand.

    Raises:
        OSError: it can't be written.
        subprocess.SubprocessError: a package can't be installed.
    """
    folder = config.cache(os.environ) / "benchmarks" / "peers"
    found, ready = folder / "bin" / "python", folder / "ready"
    here = sysconfig.get_path("purelib")
    wanted = [*_PACKAGES, *(package for packages in _NEEDED.values() for package in packages)]
    asked = "\n".join([*wanted, here])
    if not ready.exists() or ready.read_text() != asked:
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (site / "beside.pth").write_text(f"{here}\n")
        pip = [sys.executable, "-m", "pip", "--python", os.fspath(found), "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, *wanted], check=True, timeout=_INSTALL_SECONDS)
        ready.write_text(asked)
    return os.fspath(found)
