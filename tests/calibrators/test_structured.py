"""Memory of the fit of structured scaling."""

import subprocess
import sys

import pytest

# A process of its own, because the peak is that of the whole process.
PEAK = """
import resource, sys, torch
from focalkern.calibrators import StructuredScaling, _structured
torch.set_num_threads(1)
_structured._BLOCK = 1 << 16
_structured._minimise = lambda parameters, closure: closure()
fit = StructuredScaling(kind=sys.argv[1], focal=sys.argv[2] == "focal", solver="lbfgs").fit_quietly
logits, labels = torch.randn(1 << 17, 64), torch.arange(1 << 17) % 64
fit(logits[:128], labels[:128])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fit(logits, labels)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.kernels("stable")
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units")
@pytest.mark.parametrize("focal", ["focal", "softmax"])
@pytest.mark.parametrize("kind", ["vector", "matrix"])
def test_the_fit_keeps_one_copy_of_the_logits_in_float64(kind, focal):
    answer = subprocess.run([sys.executable, "-c", PEAK, kind, focal], capture_output=True, text=True, check=True)
    assert float(answer.stdout) < 1.5 * 64  # one copy has 64 MiB
