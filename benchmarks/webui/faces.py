"""Three inpaints after an image, as ADetailer makes them of faces that it finds: `hosts.py` copies this file into an
extension of its own. They are where the script says, in the sizes of the request, and none without any."""

from __future__ import annotations

from typing import Any

import gradio
from modules import scripts, shared
from modules.processing import StableDiffusionProcessingImg2Img, process_images
from PIL import Image, ImageDraw


class Faces(scripts.Script):
    def title(self) -> str:
        return "sfast faces"

    def show(self, _: bool) -> Any:
        return scripts.AlwaysVisible

    def ui(self, _: bool) -> list[Any]:
        return [gradio.Textbox("", visible=False)]

    def postprocess_image(self, p: Any, given: Any, sizes: str = "") -> None:
        if not sizes or getattr(p, "sfast_face", False):
            return
        image = given.image
        for number, size in enumerate(sizes.split(",")):
            width, height = map(int, size.split("x"))
            inner = StableDiffusionProcessingImg2Img(
                sd_model=shared.sd_model,
                outpath_samples=p.outpath_samples,
                outpath_grids=p.outpath_grids,
                init_images=[image],
                mask=self.face(image.size, number),
                resize_mode=0,
                denoising_strength=0.4,
                mask_blur=4,
                inpainting_fill=1,
                inpaint_full_res=True,
                inpaint_full_res_padding=32,
                inpainting_mask_invert=0,
                prompt=p.prompt,
                negative_prompt=p.negative_prompt,
                seed=p.seed,
                steps=p.steps,
                cfg_scale=p.cfg_scale,
                sampler_name=p.sampler_name,
                width=width,
                height=height,
                do_not_save_samples=True,
                do_not_save_grid=True,
            )
            inner.sfast_face = True
            # otherwise the WebUI's own scripts set the seed of its page
            inner.is_api = True
            inner.scripts, inner.script_args = p.scripts, p.script_args
            image = process_images(inner).images[0]
        given.image = image

    def face(self, size: tuple[int, int], number: int) -> Image.Image:
        """A mask: one of three faces in a row."""
        width, height = size
        mask = Image.new("L", size)
        middle, radius = width * (1 + 2 * number) // 6, width // 12
        box = (middle - radius, height // 2 - radius, middle + radius, height // 2 + radius)
        ImageDraw.Draw(mask).ellipse(box, fill=255)
        return mask
