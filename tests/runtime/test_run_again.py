"""A forward that is run again draws the same random numbers."""

from __future__ import annotations

import pytest
import torch

from sfast_ext.runtime import run_again
from sfast_ext.runtime.run_again import Before
from sfast_ext.weights import streamed

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Generator, torch.Generator]:
    made = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    monkeypatch.setattr(torch.cuda, "default_generators", made)
    return made


@pytest.mark.parametrize(("device", "back"), [(None, ()), (CPU, ()), (FIRST, (0,)), (torch.device("cuda"), (0,)),
                                              (SECOND, (1,)), (torch.device("cuda", 2), ())])  # fmt: skip
def test_those_of_the_cpu_and_of_one_gpu_are_put_back(
    generators: tuple[torch.Generator, ...], device: torch.device | None, back: tuple[int, ...]
) -> None:
    numbers = Before((), {}, device)

    def drawn() -> list[float]:
        return [torch.rand(1).item(), *(torch.rand(1, generator=each).item() for each in generators)]

    before = drawn()
    numbers.put_back()
    after = drawn()
    assert [a == b for a, b in zip(before, after)] == [True, *(i in back for i in range(2))]


def test_a_generator_that_tells_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Captured(torch.Generator):
        def get_state(self) -> torch.Tensor:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    monkeypatch.setattr(torch.cuda, "default_generators", (Captured(),))
    numbers = Before((), {}, FIRST)
    before = torch.rand(1)
    numbers.put_back()
    assert torch.equal(torch.rand(1), before)


@pytest.mark.parametrize("fails", [1, 2])
def test_a_generator_that_is_captured_meanwhile_hides_no_error(monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    class Captured(torch.Generator):
        asked = 0

        def get_state(self) -> torch.Tensor:
            Captured.asked += 1
            if Captured.asked >= fails:
                raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")
            return super().get_state()

    monkeypatch.setattr(torch.cuda, "default_generators", (Captured(),))
    given = [torch.ones(1)]
    before, drawn = Before((given,), {}, FIRST), torch.rand(1)
    given.pop()
    before.put_back()
    assert len(given) == 1 and torch.equal(torch.rand(1), drawn)


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", unavailable)
    before, drawn = Before((), {}, None), torch.rand(1)
    before.put_back()
    assert torch.equal(torch.rand(1), drawn)


def test_weights_that_come_to_the_gpu_of_the_arguments(
    generators: tuple[torch.Generator, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnGPU(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]
        device = SECOND  # type: ignore[assignment]

    monkeypatch.setattr(streamed, "tensors", lambda given: [torch.ones(1), torch.ones(1).as_subclass(OnGPU)])
    monkeypatch.setattr(run_again, "tensors", streamed.tensors)
    before, drawn = Before(([torch.ones(1)],), {}, CPU), torch.rand(1, generator=generators[1])
    before.put_back()
    assert torch.equal(torch.rand(1, generator=generators[1]), drawn)


def test_what_nothing_was_drawn_from_is_not_written_to(
    generators: tuple[torch.Generator, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(torch.Generator):
        def set_state(self, state: torch.Tensor) -> torch.Generator:
            raise AssertionError

    monkeypatch.setattr(torch.cuda, "default_generators", (Watched(),))
    Before((), {}, FIRST).put_back()
