"""Check what bench/gpu.py needs, before anything is imported, with Python alone; exit with 2, and say what to install.

python bench/gpu_needs.py
"""

import re
import sys
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def needs(text):
    """Return name -> least version of the package's dependencies, from the text of pyproject.toml."""
    listed = text.split("\ndependencies = [", 1)[1].split("\n]", 1)[0]
    return dict(re.findall(r'^\s*"([A-Za-z0-9_.-]+)>=([0-9.]+)', listed, flags=re.MULTILINE))


def numbers(version):
    return tuple(int(part) for part in re.match(r"[0-9.]*[0-9]", version)[0].split("."))


def lacking(wanted, installed):
    """Return name -> what is here instead, "missing" or a version, for packages that are missing or too old."""
    found = {}
    for name, least in wanted.items():
        version = installed(name)
        if version is None or numbers(version) < numbers(least):
            found[name] = version or "missing"
    return found


def installed(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main():
    if sys.version_info < (3, 10):  # noqa: UP036, this is asked of whatever Python there is
        sys.exit(f"bench/gpu.sh needs Python 3.10 or later, got {sys.version.split()[0]}; set PYTHON to another one")
    wanted = needs(PROJECT.read_text(encoding="utf-8"))
    here = lacking(wanted, installed)
    if not here:
        return
    for name, version in here.items():
        print(f"bench/gpu.sh needs {name}>={wanted[name]}, and here it is {version}", file=sys.stderr)
    # torch and what it brings of CUDA stays as it is, if it is new enough.
    packages = " ".join(f'"{name}>={wanted[name]}"' for name in here)
    print(f"install with: {sys.executable} -m pip install {packages}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
