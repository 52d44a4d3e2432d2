"""The driver is a stub here, loaded into other processes only: once loaded a library stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuworker import driver

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

# Loads the library first, if one is given; the module by its path, so as not to wait for torch.
ASK = """
import ctypes, runpy, sys
module, question, library = sys.argv[1:]
if library:
    ctypes.CDLL(library)
print(repr(runpy.run_path(module)[question]()))
print("libcuda" in open("/proc/self/maps").read())
"""

DEVICE = """
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDeviceGetUuid_v2(unsigned char *octets, int device)
{
    for (int i = 0; i < 16; i++) octets[i] = 16 * i + 15;
    return device == 40 ? 0 : 101;
}
"""


def ask(question: str, library: Path | None = None, search: Path | None = None) -> tuple[str, bool]:
    """What driver.`question`() returns in a process with `library` loaded, and whether a driver is loaded after it."""
    environ = os.environ | ({"LD_LIBRARY_PATH": str(search)} if search else {})
    command = [sys.executable, "-c", ASK, driver.__file__, question, str(library or "")]
    answer, loaded = subprocess.run(
        command, env=environ, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return answer, loaded == "True"


@pytest.fixture
def build(tmp_path: Path) -> Callable[[str], Path]:
    """Compiles a stub of libcuda.so.1."""

    def compile_stub(source: str) -> Path:
        library = tmp_path / "libcuda.so.1"
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), "-x", "c", "-"]
        subprocess.run(command, input=source, text=True, check=True)
        return library

    return compile_stub


def count_answers(status: int) -> str:
    return f"int cuDeviceGetCount(int *count) {{ *count = 0; return {status}; }}"


@pytest.mark.parametrize(("question", "answer"), [("is_initialised", "False"), ("device_uuid", "None")])
def test_a_driver_that_is_not_loaded_is_not_started(question: str, answer: str) -> None:
    assert ask(question) == (answer, False)


@needs_cc
@pytest.mark.parametrize(("question", "answer"), [("is_initialised", "False"), ("device_uuid", "None")])
def test_asking_does_not_load_the_driver(build: Callable[[str], Path], question: str, answer: str) -> None:
    library = build(count_answers(0) + DEVICE)
    assert ask(question, search=library.parent) == (answer, False)


@needs_cc
@pytest.mark.parametrize(
    ("status", "answer"),
    [
        pytest.param(3, "False", id="not-initialized"),
        pytest.param(0, "True", id="success"),
        pytest.param(100, "True", id="no-device"),
    ],
)
def test_a_loaded_driver_says_whether_it_is_started(build: Callable[[str], Path], status: int, answer: str) -> None:
    assert ask("is_initialised", build(count_answers(status))) == (answer, True)


@needs_cc
def test_the_uuid_of_the_first_device(build: Callable[[str], Path]) -> None:
    assert ask("device_uuid", build(DEVICE)) == ("'0f1f2f3f-4f5f-6f7f-8f9f-afbfcfdfefff'", True)


@needs_cc
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(DEVICE.replace("return 0", "return 3"), id="no-device"),
        pytest.param(DEVICE.replace("device == 40", "0"), id="no-uuid"),
        pytest.param(DEVICE.replace("cuDeviceGetUuid_v2", "cuDeviceGetUuid"), id="driver-before-11.4"),
    ],
)
def test_a_driver_that_cannot_tell_the_uuid(build: Callable[[str], Path], source: str) -> None:
    assert ask("device_uuid", build(source)) == ("None", True)
