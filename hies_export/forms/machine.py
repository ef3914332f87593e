"""Describe the machine and the library versions of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from ..version import __version__
from .runtimes.llamacpp import installed_version as node_llama_cpp_version


def machine_facts() -> dict[str, Any]:
    """Return the processor, GPU and library versions of this machine, None if missing; no host name, user or paths."""
    packages = ("torch", "transformers", "onnxruntime", "onnxruntime-gpu", "openvino", "nncf", "optimum")
    return {
        "python": platform.python_version(),
        **{name.replace("-", "_"): _version(name) for name in packages},
        "node_llama_cpp": node_llama_cpp_version(),
        "hies_export": __version__,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "os": f"{platform.system()} {platform.machine()}",
    }


def _version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """Return the name of the processor, on Linux by /proc/cpuinfo, which is more precise than `platform`."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or platform.machine()
