"""The reader of machine code (sassrun): an unknown instruction is an error. The results of the kernels test the
instructions: FOCALKERN_PTX=arch=machine_code, and machine_code_100.
"""

import struct
import subprocess
from pathlib import Path

import pytest

build = pytest.importorskip("tools.cuda.build", reason="the tools are in the source tree only")
extract = pytest.importorskip("tools.cuda.sass.extract", reason="the tools are in the source tree only")

KNOWN = [  # of sm_90, of sm_100, of both
    "ULDC.64 UR4, c[0x0][0x208]",
    "VIMNMX R3, R3, R4, PT",
    "LDCU.128 UR72, c[0x0][0x3f0]",
    "VIMNMX R3, PT, PT, R3, UR4, !PT",
    "FMNMX3 R3, R3, R4, R5, !PT",
    "FMNMX.NAN R3, RZ, R3, PT",
    "VOTEU.ANY UR5, UPT, PT",
    "VOTEU.ALL UP0, P1",
    "@!P1 BREAK.RELIABLE P2, B0",
    "S2R R7, SR_LTMASK",
    "LD.E R53, desc[UR10][R52.64+0x4]",
    "IADD3 R3, PT, PT, R3, 0x1, RZ",
    "@UP0 UPRMT UR4, UR4, 0x5410, URZ",
    "MOV.SPILL R238, UR5",
    "R2UR.FILL UR5, R238",
    "R2P PR, R72, 0x1c",
    "@!P1 HMNMX2.BF16_V2 R0, R48, -INF , -INF , !PT",
    "VHMNMX R34, R34, R13, R21, !PT",
    "VHMNMX.BF16_V2 R37, R22, -INF , -INF , R6, !PT",
    "HSET2.BF16_V2.GT.AND R33, R38, R35, PT",
    "HSET2.GT.AND R33, R38, R35, PT",
]
UNKNOWN = {
    "FMNMX4 R3, R3, R4, R5, R6, !PT": "unknown instruction",
    "FFMA2 R4, R4.F32x2.HI_LO, R6.F32x2.HI_LO, R8.F32x2.HI_LO": "unknown instruction",
    "FMNMX.XORSIGN R3, R3, R4, PT": "unknown modifier XORSIGN",
    "LDG.E.ENL2.256 R8, R4, desc[UR4][R2.64]": "unknown modifier ENL2",
    "VIMNMX R3, P0, PT, R3, R4, PT": "VIMNMX",
    "VOTEU.ANY UR5, UP0, P1": "VOTEU",
    "S2R R7, SR_CLOCKLO": "S2R",
    "BREAK P2, P3": "BREAK",
    "HMNMX2 R3, R4, R5, PT": "HMNMX2",
    "HMNMX2 R3, R4, -INF , -QNAN , !PT": "HMNMX2",
    "HSET2.GT.AND R3, |R4|, R5, PT": "HSET2",
    "HSET2.BF.GT.AND R3, R4, R5, PT": "unknown modifier BF",
    "HSET2.BF16_V2.AND R3, R4, R5, PT": "HSET2",
    "VHMNMX.NAN R3, R4, R5, R6, !PT": "unknown modifier NAN",
}


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory):
    """Reads one kernel: the stdout and stderr of decode.cpp."""
    folder = tmp_path_factory.mktemp("sassrun")
    program, source = folder / "decode", build.HERE / "sass/decode.cpp"
    try:
        compiler = build.compiler()
    except build.ToolMissingError as problem:
        pytest.skip(str(problem))
    subprocess.run([compiler, "-std=c++17", f"-I{build.HERE}", str(source), "-o", str(program)], check=True)

    def run(instructions: list[str], at: int = 0x210) -> tuple[str, str]:
        text = Path(folder, "code.txt")
        lines = [f"{16 * i:04x} 0x0 0x0 {instruction}" for i, instruction in enumerate(instructions)]
        text.write_text("\n".join([f"K kernel 0 {at} -", *lines]) + "\n")
        done = subprocess.run([str(program), str(text)], capture_output=True, text=True)
        return done.stdout, done.stderr

    return run


def test_known_instructions_are_decoded(decode):
    assert decode(KNOWN) == ("kernel 528\n", "")
    assert decode(["NOP"], 0x380) == ("kernel 896\n", "")


@pytest.mark.parametrize("instruction", UNKNOWN)
def test_unknown_instructions_are_errors(decode, instruction):
    names, error = decode(["NOP", instruction])
    assert names == ""
    assert UNKNOWN[instruction] in error


def test_parameters_elsewhere_are_an_error(decode):
    names, error = decode(["NOP"], 0x160)  # of sm_80
    assert names == ""
    assert "parameters in another place" in error


def test_where_parameters_begin():
    before = struct.pack("<BBHII", 4, 0x17, 8, 0, 0) + struct.pack("<BBH", 3, 0x1B, 255)
    assert extract.params_at(before + struct.pack("<BBHIHH", 4, 0x0A, 8, 12, 0x380, 88)) == 0x380
    assert extract.params_at(before) == 0
