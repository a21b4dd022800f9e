"""Every plan that cuDNN has for a 3x3 convolution, by nvidia-cudnn-frontend where that is installed."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

WORKSPACE = 1 << 30
"""Bytes that a plan may use beside its operands."""


class Convolution:
    """out = conv2d(x, weight) with padding 1, channels last, in float16 with sums in float32, by a plan that is named.

    Args:
        x (N, C, H, W), weight (K, C, 3, 3), out (N, K, H, W): channels last, on one GPU.

    Raises:
        ImportError: nvidia-cudnn-frontend is not installed.
    """

    def __init__(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        import cudnn  # type: ignore[import-not-found]

        self._handle = cudnn.create_handle()
        kinds = cudnn.data_type
        graph = self._graph = cudnn.pygraph(
            handle=self._handle,
            io_data_type=kinds.HALF,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
        )
        image, filters = (graph.tensor(dim=list(t.shape), stride=list(t.stride())) for t in (x, weight))
        result = graph.conv_fprop(image=image, weight=filters, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        result.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK])
        self.built = self._build()
        """The numbers of the plans."""
        self._set_stream: Any = cudnn.set_stream
        self._given = {image: x, filters: weight, result: out}
        size = max([graph.get_workspace_size_plan_at_index(i) for i in self.built], default=0)
        self._workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=x.device)

    def _build(self) -> list[int]:
        """The heuristics' plans, and one of each engine, as it is by default."""
        with contextlib.suppress(Exception):
            for engine in range(self._graph.get_engine_count()):
                with contextlib.suppress(Exception):
                    self._graph.create_execution_plan(engine, {})
        built = []
        for number in range(self._graph.get_execution_plan_count()):
            with contextlib.suppress(Exception):
                self._graph.build_plan_at_index(number)
                if self._graph.get_workspace_size_plan_at_index(number) <= WORKSPACE:
                    built.append(number)
        return built

    def run(self, plan: int) -> None:
        """Compute the convolution on the current stream."""
        self._set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        self._graph.execute_plan_at_index(self._given, self._workspace, plan, self._handle)
