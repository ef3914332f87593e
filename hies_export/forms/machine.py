"""Describe the machine and the library versions of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from ..model.modes import threads_of_small_work
from ..version import __version__
from .runtimes.llamacpp import installed_version as node_llama_cpp_version


def machine_facts() -> dict[str, Any]:
    """Return the processor, GPU and library versions of this machine, without host name, user or paths.

    What is missing is None; clocks are in MHz, the power limit in W.
    """
    gpu = gpu_facts()
    packages = ("torch", "transformers", "onnxruntime", "onnxruntime-gpu", "openvino", "nncf", "optimum")
    return {
        "python": platform.python_version(),
        **{name.replace("-", "_"): _version(name) for name in packages},
        "node_llama_cpp": node_llama_cpp_version(),
        "hies_export": __version__,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "threads_of_small_work": threads_of_small_work(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else gpu.get("name"),
        "cuda": torch.version.cuda,
        "gpu_driver": gpu.get("driver_version"),
        "gpu_max_sm_mhz": gpu.get("clocks.max.sm"),
        "gpu_max_memory_mhz": gpu.get("clocks.max.memory"),
        "gpu_power_limit_w": gpu.get("power.limit"),
        "os": f"{platform.system()} {platform.machine()}",
    }


def gpu_facts() -> dict[str, str]:
    """Return what nvidia-smi says of the GPU that torch uses, or else of the first; empty without one.

    The fields are the name, driver_version, clocks in MHz and power.limit in W, of those that the GPU supports.
    Source: https://docs.nvidia.com/deploy/nvidia-smi/index.html (`--help-query-gpu`)
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    used = "0"
    if torch.cuda.is_available():  # by uuid, because CUDA_VISIBLE_DEVICES may number GPUs otherwise
        used = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    fields = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.max.memory", "power.limit")
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", f"--id={used}"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in printed.splitlines()[0].split(",")] if printed.strip() else []
    # A field that the GPU does not support reads "[N/A]".
    return {name: value for name, value in zip(fields, values, strict=False) if not value.startswith("[")}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or platform.machine()
