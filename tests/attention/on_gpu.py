"""What tests of attention kernels in CUDA C++ share: against a dense softmax, and in graphs."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.attention.test_backends import Case, dense
from tests.attention.test_triton import on_device
from verifypd.attention.triton import TritonAttention

CUDA = torch.device("cuda", 0)


class AgainstDense:
    """Against float64."""

    kernel: ModuleType  # that launches it
    error: dict[torch.dtype, float]  # of a row's result, against its norm

    @pytest.fixture(autouse=True)
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Most splits of each launch of this kernel."""
        found, attend = [], self.kernel.attend

        def remembered(*args) -> None:
            found.append(args[3].splits)
            attend(*args)

        monkeypatch.setattr(self.kernel, "attend", remembered)
        return found

    def attend(self, case: Case) -> Tensor:
        chosen = TritonAttention()
        prepared = chosen.prepare(case.layout)
        heads = [x.shape[1] for x in (case.q, case.k, case.v)]
        fused = torch.cat((case.q, case.k, case.v), 1).to(case.cache.k.dtype)
        q, k, v = fused.split(heads, 1)  # views, as a model has them
        scale = q.shape[-1] ** -0.5
        for _ in range(2):  # the first makes the plan; the second may start early, and finds the counters as they were
            out = chosen.attend(q, k, v, case.cache, case.layout, prepared, scale=scale, window=None, softcap=None)
        return out

    def check(self, case: Case) -> Tensor:
        out = self.attend(on_device(case)).cpu()
        assert out.isfinite().all()
        for row, expected in dense(case, case.q.shape[-1] ** -0.5, None, None).items():
            error = (out[row].double() - expected.double()).norm() / expected.double().norm()
            assert error < self.error[out.dtype], (row, float(error))
        return out
