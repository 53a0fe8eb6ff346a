"""The compiler (numba) behind one typed decorator, and where it keeps machine code between processes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numba
import platformdirs

# Folders with functions that are compiled.
COMPILED = ("experts", "policy", "simulate")

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """``function`` compiled at its first call; the machine code is kept on disk where a folder can be written."""
    return _compile(function)


def compiled_without_allocations(function: Function) -> Function:
    """``compiled``, for a function that makes no array: without reference counts, which cost more than the work where
    small functions are inlined (five times, measured)."""
    return _compile(function, _nrt=False)


def compiled_without_lock(function: Function) -> Function:
    """``compiled``, for a long-running function beside which other threads go on."""
    return _compile(function, nogil=True)


def _compile(function: Function, **options: bool) -> Function:
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = before or str(_cache_folder())
    try:
        fast: Function = numba.njit(cache=True, error_model="numpy", **options)(function)
    except RuntimeError:
        # No folder can be written: compile in every process.
        fast = numba.njit(error_model="numpy", **options)(function)
    finally:
        numba.config.CACHE_DIR = before
    return fast


def inlined(function: Function) -> Function:
    """``function`` compiled into every compiled caller: for small ones on a hot path."""
    fast: Function = numba.njit(inline="always", error_model="numpy")(function)
    return fast


@functools.cache
def _cache_folder() -> Path:
    # Numba renews cached code when its own file changes, not when a function that it calls does: so each state of the
    # sources has a folder of its own.
    state = hashlib.sha256(numba.__version__.encode())
    here = Path(__file__).parent
    for path in sorted(path for folder in COMPILED for path in (here / folder).glob("*.py")):
        about = path.stat()
        state.update(f"{path.name} {about.st_size} {about.st_mtime_ns}".encode())
    return Path(platformdirs.user_cache_dir("caee")) / "compiled" / state.hexdigest()[:16]
