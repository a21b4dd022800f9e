"""A live preview: a small decoder that works beside the image, in a thread and on a stream of its own."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch.nn.functional import conv2d, group_norm, interpolate, silu

from sfast_ext.runtime.verify import relative_error

# its libraries may choose another algorithm when memory is short
TOLERANCE = 0.02
# one image in so many draws random numbers, from the generator that everybody shares
DRAWING = 10


class Preview(threading.Thread):
    """Decodes the same latents over and over; used as a context.

    Args:
        channels, size: of the decoder and of its latents.
        pause: seconds between two images.
    """

    def __init__(
        self, device: torch.device, *, channels: int = 64, size: int = 64, pause: float = 0.1, seed: int = 0
    ) -> None:
        super().__init__(name="preview", daemon=True)
        self._device, self._pause = device, pause
        self._dtype = torch.float16 if device.type == "cuda" else torch.float32
        self._ended = threading.Event()
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            scale = shape[1] * shape[2] * shape[3] if len(shape) == 4 else 1
            return (torch.randn(shape, generator=generator) * scale**-0.5).to(device, self._dtype)

        self._latents = torch.randn(1, 4, size, size, generator=generator).to(device, self._dtype)
        self._entry = random(channels, 4, 3, 3)
        self._stages = [random(channels, channels, 3, 3) for _ in range(3)]
        self._exit = random(3, channels, 3, 3)
        self.images = 0
        self.faults: list[str] = []

    def __enter__(self) -> Preview:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self.join()

    def decode(self) -> torch.Tensor:
        """One image; by functions alone, taken when this was imported: those in torch may be replaced by now."""
        x = conv2d(self._latents, self._entry, padding=1)
        for weight in self._stages:
            x = interpolate(silu(x), scale_factor=2.0)
            x = group_norm(conv2d(x, weight, padding=1), 8)
        return conv2d(x, self._exit, padding=1)

    def run(self) -> None:
        """Decode until told to end; what goes wrong is kept in `faults`."""
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        expected: torch.Tensor | None = None
        with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            while not self._ended.wait(self._pause):
                try:
                    image = self.decode().float()
                    if self.images % DRAWING == 0:
                        torch.randn(8, device=self._device)
                    # sizes of its own, that come and go
                    torch.empty((1 + self.images % 7) << 20, dtype=torch.uint8, device=self._device).zero_()
                    shown = image.cpu()
                except Exception as exc:
                    self.faults.append(f"image {self.images} of the preview failed: {type(exc).__name__}: {exc}")
                    return
                expected = shown if expected is None else expected
                error = relative_error([shown], [expected])
                if not error <= TOLERANCE:
                    self.faults.append(f"image {self.images} of the preview differs from the first by {error:.3g}")
                self.images += 1
