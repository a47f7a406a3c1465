"""The planted faults (mutants.py) match the source: each replaces existing text."""

import pytest

build = pytest.importorskip("tools.cuda.build", reason="the tools are in the source tree only")
mutants = pytest.importorskip("tools.cuda.mutants", reason="the tools are in the source tree only")
pytestmark = pytest.mark.skipif(not build.CSRC.is_dir(), reason="needs the sources")


def test_every_fault_can_be_planted():
    faults = mutants.all_faults()
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        text = (mutants.CUDA / fault.file).read_text()
        assert text.count(fault.old) > fault.nth, fault.name
        assert fault.plant(text) != text


def test_text_that_occurs_more_than_once_is_counted():
    for fault in mutants.FAULTS:
        same = [f for f in mutants.FAULTS if (f.file, f.old) == (fault.file, fault.old)]
        count = (mutants.CUDA / fault.file).read_text().count(fault.old)
        assert count == 1 or len({f.nth for f in same}) == count, fault.name


def test_redundant_faults_exist():
    assert set(mutants.REDUNDANT) <= {fault.name for fault in mutants.all_faults()}


def test_there_are_enough_faults():
    assert len(mutants.all_faults()) >= 25
    assert {fault.file for fault in mutants.all_faults()} >= {path.name for path in mutants.CUDA.glob("*.cu")}
