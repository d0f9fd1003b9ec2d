"""The CUDA kernels compiled for the CPU, where fibers run their threads: csrc/cuda as it is, with the same
binding, registered for CPU tensors."""

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

from esp_kernels import _backend
from tests.device import DEVICE

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
FOLDER = ROOT / "build" / "emulated"
# An environment variable: a library to load in the place of the usual one; empty: none.
LIBRARY = "ESP_EMULATED_LIBRARY"
SANITIZE = os.environ.get("ESP_SANITIZE", "0") == "1"

CXX = os.environ.get("CXX", "g++")
# CUDA's rules of aliasing are not C++'s.
FLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Wextra", "-DESP_EMULATED"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]


def _hash(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def _run(*command: object) -> None:
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # not for compilers
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=env)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")


def _replace(path: Path, command: list[object]) -> Path:
    """Runs a compiler that writes `path`, unless it or another process has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            partial = path.with_suffix(".partial")
            _run(*command, "-o", partial)
            partial.replace(path)
    return path


def _object(source: Path, csrc: Path, headers: str, sanitize: bool) -> Path:
    flags = [*FLAGS, f"-I{csrc / 'include'}", f"-I{csrc}", *(SANITIZERS if sanitize else [])]
    if source.suffix == ".cu":
        flags += ["-x", "c++"]
    if source.name == "register.cpp":
        flags += [f"-isystem{path}" for path in cpp_extension.include_paths()]
        headers += torch.__version__
    flags_key = [flag.replace(str(csrc), "csrc") for flag in map(str, flags)]
    name = f"{source.stem}-{_hash(CXX, flags_key, headers, source.read_text())}.o"
    return _replace(FOLDER / name, [CXX, *flags, "-c", source])


def build(csrc: Path = CSRC, sanitize: bool = SANITIZE) -> Path:
    """The library of the sources under `csrc`."""
    header_files = sorted([*csrc.glob("include/esp/*.*h"), *csrc.glob("emulator/*.h"), *csrc.glob("*.h")])
    device = _hash(*(path.read_text() for path in header_files))
    # The binding sees neither device code nor the emulator, and takes longest to compile.
    own = [path for path in header_files if path.suffix != ".cuh" and path.parent.name != "emulator"]
    host = _hash(*(path.read_text() for path in own))
    sources = [*csrc.glob("cuda/*.cu"), *csrc.glob("emulator/*.cpp"), csrc / "cuda/register.cpp"]
    objects = [
        _object(s, csrc, host if s.name == "register.cpp" else device, sanitize) for s in sorted(sources)
    ]
    name = f"esp_emulated-{_hash(*objects)}.so"
    links = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu", "-lc10"]
    return _replace(FOLDER / name, [CXX, "-shared", *objects, *links, *(SANITIZERS[:1] if sanitize else [])])


def build_one(source: Path, sanitize: bool = False) -> Path:
    """A library of one source and the emulator, without torch."""
    own = [CSRC / "include/esp/cuda.h", CSRC / "include/esp/hopper.cuh", *sorted(CSRC.glob("emulator/*.h"))]
    headers = _hash(*(path.read_text() for path in own))
    objects = [_object(s, CSRC, headers, sanitize) for s in (source, *sorted(CSRC.glob("emulator/*.cpp")))]
    name = f"{source.stem}-{_hash(*objects)}.so"
    return _replace(FOLDER / name, [CXX, "-shared", *objects, *(SANITIZERS[:1] if sanitize else [])])


class Emulator:
    """The emulated ops, loaded: esp_kernels_cuda serves CPU tensors from here on."""

    def __init__(self, library: Path):
        torch.ops.load_library(str(library))
        self._set_seed = ctypes.CDLL(str(library)).esp_emulator_seed

    def seed(self, value: int) -> None:
        """0 runs a block's threads in order, 1 in reverse, any other shuffles them."""
        self._set_seed(ctypes.c_uint(value))


@functools.cache
def load() -> Emulator | None:
    """None, with a line on why, where there is no compiler."""
    given = os.environ.get(LIBRARY)
    if given == "":
        return None
    if given is None and shutil.which(CXX) is None:
        print(f"the CUDA kernels are not emulated: no {CXX}")
        return None
    return Emulator(Path(given) if given else build())


def serves_cuda() -> bool:
    """Whether backend "cuda" runs where the tests run: emulated, or natively."""
    return _backend.cuda_error is None if DEVICE == "cuda" else load() is not None
