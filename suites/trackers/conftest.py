"""The packages of the trackers, in a directory of their own in the cache."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.assets.cache import asset

PACKAGES = ("wandb==0.31.0", "mlflow==3.17.2", "trackio==0.43.0", "tensorboard==2.21.0")
IMPORTED = (
    "absl-py==2.5.1",
    "cachetools==7.3.2",
    "cloudpickle==3.1.2",
    "databricks-sdk==0.156.0",
    "gradio-client==2.7.2",
    "grpcio==1.85.1",
    "importlib-metadata==9.1.0",
    "mlflow-skinny==3.17.2",
    "mlflow-tracing==3.17.2",
    "pillow==12.3.0",
    "python-multipart==0.0.34",
    "sqlparse==0.6.1",
    "tensorboard-data-server==0.7.2",
    "werkzeug==3.1.9",
    "zipp==4.1.2",
)
"""What they import here that Polar's environment lacks; their servers and plots need more."""


def _install(into: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
    subprocess.run([*pip, "--target", str(into), *PACKAGES, *IMPORTED], check=True)


@pytest.fixture(scope="session", autouse=True)
def packages() -> Iterator[Path]:
    version = f"py{sys.version_info.major}.{sys.version_info.minor}"
    directory = asset("-".join(["trackers", *PACKAGES, version]).replace("==", "-"), _install)
    with pytest.MonkeyPatch.context() as patch:
        # Behind everything that is installed: what Polar has itself is not replaced.
        patch.setattr(sys, "path", [*sys.path, str(directory)])
        yield directory


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything stays in the test's directory, and nothing is sent."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb-data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path
