"""What the routes answer, for the WebUI's description of its API."""

from __future__ import annotations

from typing import Any, Optional

from pydantic import BaseModel, Field

# pydantic evaluates annotations, and its older version knows no `X | None`
# ruff: noqa: UP045


class Host(BaseModel):
    """The WebUI."""

    name: str = Field(..., description="its name, or that of the WebUI that it is served as")
    version: str = Field(..., description="its version; unknown if it does not tell")
    remarks: list[str] = Field(..., description="whether it was not tested, and what does not work in it")


class Version(BaseModel):
    """Versions."""

    version: str = Field(..., description="of the extension")
    host: Host = Field(..., description="the WebUI")


class Plan(BaseModel):
    """What is kept ready for one size, batch and prompt length."""

    network: Optional[str] = Field(None, description="the network that it accelerates: unet, refiner or controlnet")
    label: str = Field(..., description="size, images and tokens in words")
    signature: str = Field(..., description="all inputs with their types and shapes")
    state: str = Field(..., description="whether it replays a CUDA graph")
    last_pass: bool = Field(..., description="whether the last image used it")
    replays: int = Field(..., description="steps that it made")
    used_at: Optional[float] = Field(None, description="when an image used it last, in seconds since 1970")
    ms_before: Optional[float] = Field(None, description="milliseconds of the original's step, measured for it")
    ms_after: Optional[float] = Field(None, description="milliseconds of its own step, measured at the same time")
    speedup: Optional[float] = Field(None, description="their ratio; null on a CPU: they are not timed alike")
    first_call_s: Optional[float] = Field(None, description="seconds that its preparation took")
    memory_mb: float = Field(..., description="GPU memory of its CUDA graph")
    error: Optional[float] = Field(None, description="relative difference from the original")


class Reason(BaseModel):
    """Why steps were not accelerated."""

    reason: str = Field(..., description="the sentence")
    reason_parts: list[str] = Field(..., description="the same in pieces, names and numbers apart from words")
    code: str = Field(..., description="its entry in the help")
    values: list[Any] = Field(..., description="the names and numbers in the sentence, in order")
    calls: int = Field(..., description="steps since the start")
    calls_last: int = Field(..., description="steps of the last image")
    seconds_ago: float = Field(..., description="since the last such step")


class Badge(BaseModel):
    """The state in short."""

    state: str = Field(..., description="on, partly, preparing, ready, original, off or none")
    text: str = Field(..., description="a few words")
    detail: str = Field(..., description="a sentence")
    text_parts: list[str] = Field(..., description="the words in pieces, names and numbers apart from words")
    detail_parts: list[str] = Field(..., description="the sentence in such pieces")
    help: Optional[str] = Field(..., description="its entry of the help; null if nothing is to be done")
    note: Optional[str] = Field(None, description="what the user should know in addition; null if there is nothing")
    note_parts: list[str] = Field([], description="the same in such pieces")
    note_help: Optional[str] = Field(None, description="its entry of the help")
    progress: Optional[float] = Field(None, description="0 to 1 while a size is prepared; null if it is not known")


class EightBits(BaseModel):
    """What is computed in 8 bits."""

    on: bool = Field(..., description="whether the setting is on")
    layers: int = Field(..., description="layers in 8 bits")
    kept: list[list[Any]] = Field(..., description="name and error of those kept in half precision, worst first")
    bytes: int = Field(..., description="GPU memory of the copies of weights in 8 bits")
    note: Optional[str] = Field(None, description="why it is not used, or why details are likely to suffer")
    note_parts: list[str] = Field(..., description="the same in pieces, names and numbers apart from words")
    help: Optional[str] = Field(None, description="its entry of the help")


class Row(BaseModel):
    """What came of one size."""

    label: str = Field(..., description="size and images in words; compare: which of the two")
    size: Optional[str] = Field(None, description="width x height in pixels")
    images: Optional[int] = Field(None, description="made at once")
    tokens: Optional[int] = Field(None, description="length of the prompt that was asked for")
    ready: bool = Field(..., description="whether the next image of this size is accelerated from its first step on")
    reason: Optional[str] = Field(None, description="why not")
    ms_before: Optional[float] = Field(None, description="measure: median milliseconds of the original's step")
    ms_after: Optional[float] = Field(None, description="measure: median milliseconds of the accelerated step")
    speedup: Optional[float] = Field(None, description="measure: their ratio")


class Job(BaseModel):
    """Work that was started by prepare, measure or compare."""

    kind: str = Field(..., description="prepare, measure or compare")
    state: str = Field(..., description="waiting (for an image to end), running, done, cancelled or failed")
    done: int = Field(..., description="steps that are done")
    total: int = Field(..., description="all its steps: one for each size and number of images")
    label: Optional[str] = Field(None, description="the step that is done now")
    seconds: float = Field(..., description="since it began")
    seconds_left: Optional[float] = Field(None, description="as the steps so far took; null before the first is done")
    message: Optional[str] = Field(None, description="why it failed")
    rows: list[Row] = Field(..., description="results, one for each step that is done")


class LastJob(BaseModel):
    """The last job."""

    job: Optional[Job] = Field(None, description="null if none was started")


class Side(BaseModel):
    """One of two images."""

    width: int = Field(..., description="in pixels")
    height: int = Field(..., description="in pixels")
    seconds: float = Field(..., description="of the whole request, with prompt and VAE")
    steps: dict[str, int] = Field(..., description="how many were accelerated, prepared and left to the original")
    reason: Optional[str] = Field(None, description="why steps were left to the original")


class Comparison(BaseModel):
    """The last image, made with and without the extension. The images: comparison/accelerated.png and original.png."""

    accelerated: Side = Field(..., description="with it")
    original: Side = Field(..., description="without it")
    times: Optional[float] = Field(None, description="seconds without it, divided by those with it")
    mean_difference: Optional[float] = Field(None, description="of 255; null if the images have different sizes")
    largest_difference: Optional[int] = Field(None, description="of 255")
    same_request: bool = Field(..., description="false if prompts or seeds are chosen at random for each image")


class LastComparison(BaseModel):
    """The last comparison."""

    comparison: Optional[Comparison] = Field(None, description="null if there was none")


class Measurement(BaseModel):
    """A kept measurement."""

    when: str = Field(..., description="local date and time")
    version: str = Field(..., description="of the extension")
    host: str = Field(..., description="the WebUI")
    model: str = Field(..., description="the kind of the model, its size and its numbers; not its name")
    gpu: Optional[str] = Field(None, description="the card")
    driver: Optional[str] = Field(None, description="of NVIDIA")
    torch: Optional[str] = Field(None, description="its version")
    cuda: Optional[str] = Field(None, description="that torch was built with")
    triton: Optional[str] = Field(None, description="its version")
    rows: list[Row] = Field(..., description="one for each size and number of images")


class Cancelled(BaseModel):
    """The effect of cancel."""

    cancelled: bool = Field(..., description="whether there was a job to cancel")


class Status(BaseModel):
    """All that is known."""

    version: str = Field(..., description="of the extension")
    host: Host = Field(..., description="the WebUI")
    environment: dict[str, Any] = Field(..., description="torch, CUDA, GPU, Triton")
    busy: bool = Field(..., description="whether the WebUI is at a job")
    no_gpu: Optional[str] = Field(None, description="why nothing can be accelerated on this machine")
    enabled: bool = Field(..., description="whether the setting is on")
    unserved: Optional[str] = Field(None, description="why nothing of the extension is installed in this WebUI")
    model: Optional[str] = Field(None, description="the loaded model")
    job: Optional[Job] = Field(None, description="the job of prepare, measure or compare that runs, or the last one")
    badge: Badge = Field(..., description="the state in short")
    accelerators: list[dict[str, Any]] = Field(..., description="one for each network, with its plans")
    eight_bits: Optional[EightBits] = Field(None, description="what is computed in 8 bits; null if nothing can be said")
    preparing: Optional[dict[str, Any]] = Field(None, description="what is being prepared, its stage and seconds")
    last_pass: dict[str, int] = Field(..., description="steps of the last image: accelerated, bypassed, prepared")
    reasons: dict[str, int] = Field(..., description="why steps were bypassed, in the last two passes of the sampler")
    reasons_since_start: dict[str, int] = Field(..., description="the same since the start")
    reasons_listed: list[Reason] = Field(..., description="the same with age and entry in the help")


class ReportText(BaseModel):
    """A bug report."""

    text: str = Field(..., description="versions, card, settings, reasons and the last error; no prompt, no folders")


class Dropped(BaseModel):
    """The effect of drop."""

    dropped: int = Field(..., description="plans that there were")
