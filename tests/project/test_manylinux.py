"""tools/manylinux.py and the tag of the wheel: a library with newer symbols, linked with and without the flags."""

import ctypes
import platform
import shutil
import subprocess
import zipfile

import pytest

manylinux = pytest.importorskip("tools.manylinux", reason="not in the source tree")
wheel = pytest.importorskip("tools.wheel", reason="not in the source tree")

# The lines with a version use symbols that new compilers take from libraries newer than those of manylinux_2_28.
CODE = """
#include <cmath>
#include <exception>
#include <iostream>  // GLIBCXX_3.4.32, from g++ 13 on
#include <memory>
#include <new>
#include <pthread.h>
#include <sstream>
#include <stdexcept>
#include <utility>

static void* doubled(void* x) { *static_cast<double*>(x) *= 2; return nullptr; }

extern "C" double run(double x, int count) {
  pthread_t thread;                                          // libpthread.so.0 until glibc 2.34
  pthread_create(&thread, nullptr, doubled, &x);
  pthread_join(thread, nullptr);
  std::ostringstream out;                                    // GLIBCXX_3.4.26
  std::exception_ptr error, copy;
  try { throw std::runtime_error("2.5"); } catch (...) { error = std::current_exception(); }
  for (int i = 0; i < count; ++i) copy = error;              // CXXABI_1.3.13
  try { std::rethrow_exception(copy); } catch (const std::exception& e) { out << e.what(); }
  std::shared_ptr<double> one(new double(std::log(x)));      // GLIBC_2.29, GLIBC_2.32
  std::shared_ptr<double> two = one;
  try { *two += *std::allocator<double>().allocate(count - 4l); } catch (const std::bad_array_new_length&) {
    out << "0";                                              // GLIBCXX_3.4.29
  }
  std::stringstream in;
  double read;
  const long long ones = std::stoll(std::string(std::size_t(count), '1'));  // GLIBC_2.38, with its headers
  std::string sum = std::to_string(ones);
  sum.replace(0, 2, "23");                                   // GLIBCXX_3.4.31, from g++ 13 on
  in << out.str() << std::move(out).str() << sum;            // GLIBCXX_3.4.29
  in >> read;
  return *two + read;
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The object file of the code above."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not here")
    folder = tmp_path_factory.mktemp("manylinux")
    subprocess.run(
        ["g++", "-std=c++20", "-O2", "-fPIC", "-c", "-x", "c++", "-", "-o", folder / "code.o"],
        input=CODE, text=True, check=True,
    )  # fmt: skip
    return folder / "code.o"


def wheel_with(library, folder):
    path = folder / f"thing-1.0-cp311-abi3-linux_{platform.machine()}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(library, "thing/lib.so")
        archive.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        tag = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-abi3-linux_{platform.machine()}\n"
        archive.writestr("thing-1.0.dist-info/WHEEL", tag)
        archive.writestr("thing-1.0.dist-info/RECORD", "".join(f"{name},,\n" for name in archive.namelist()))
    return path


def test_a_library_gets_the_symbols_of_old_systems(compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(manylinux, "BUILD", tmp_path)
    library = tmp_path / "lib.so"
    wheel.link(library, [compiled], *manylinux.old_libraries())
    (tmp_path / "out").mkdir()
    made = wheel.with_platform_tag(wheel_with(library, tmp_path), tmp_path / "out")
    assert made.name == f"thing-1.0-cp311-abi3-manylinux_2_28_{platform.machine()}.whl"
    function = ctypes.CDLL(str(library)).run
    function.restype = ctypes.c_double
    assert function(ctypes.c_double(0.5), 3) == 2.502  # log(2 * 0.5) + 2.502.50231


def test_a_wheel_with_newer_symbols_is_refused(compiled, tmp_path):
    library = tmp_path / "lib.so"
    wheel.link(library, [compiled])
    (tmp_path / "out").mkdir()
    with pytest.raises(SystemExit, match="too-recent versioned symbols"):
        wheel.with_platform_tag(wheel_with(library, tmp_path), tmp_path / "out")


def test_a_symbol_has_the_last_version_before_the_limit():
    listing = (
        "0000000000039370 T exp@@GLIBC_2.29\n00000000000138b0 T exp@GLIBC_2.2.5\n"
        "00000000000a2d70 T memcpy@GLIBC_2.2.5\n000000000009be70 i memcpy@@GLIBC_2.14\n"
        "00000000001db320 V environ@@GLIBC_2.2.5\n0000000000042000 T arc4random@@GLIBC_2.36\n"
        "0000000000000010 B errno@@GLIBC_PRIVATE\n0000000000000000 A GLIBC_2.28\n"
    )
    assert manylinux.old_symbols(listing) == {
        "exp": ((2, 2, 5), "T"),
        "memcpy": ((2, 14), "i"),
        "environ": ((2, 2, 5), "V"),
    }
