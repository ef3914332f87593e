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
    """Return the processor, GPU and library versions of this machine, without host name, user or paths."""
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
    """Return the name of the GPU that torch uses, its driver, clocks in MHz and power limit in W; empty without one.

    Where torch uses none, it is the first.

    Source: https://docs.nvidia.com/deploy/nvidia-smi/index.html (`--help-query-gpu`)
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    # Numbers differ where CUDA_VISIBLE_DEVICES names some of the GPUs, or torch uses another than the first.
    used = "0"
    if torch.cuda.is_available():
        used = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    fields = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.max.memory", "power.limit")
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", f"--id={used}"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in printed.splitlines()[0].split(",")] if printed.strip() else []
    # A field the card does not support reads "[N/A]".
    return {name: value for name, value in zip(fields, values, strict=False) if not value.startswith("[")}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
