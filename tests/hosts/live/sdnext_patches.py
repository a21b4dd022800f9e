"""An extension of SD.Next for these tests: patches the UNet, when asked to, in the ways that extensions do.

Copied into the `extensions` of a data directory. `POST /test/v1/patch?kind=…` takes the last patch away and puts one of
`PATCHES` in its place, or none. What a patch does depends on the number of the step, which no argument shows.
"""

from modules import script_callbacks, shared


def louder(by=300.0):
    """A factor that no plan could have kept."""
    return 1.0 + by * shared.state.sampling_step


def attention(unet):
    """Another forward on one attention layer."""
    module = unet.up_blocks[1].attentions[0].transformer_blocks[0].attn1
    original = module.forward

    def patched_attention(*args, **kwargs):
        return original(*args, **kwargs) * louder()

    module.forward = patched_attention
    return lambda: module.__dict__.pop("forward", None)


def resnets(unet):
    """Another forward in the class of all residual blocks."""
    kind = type(unet.mid_block.resnets[0])
    original = kind.forward

    def patched_resnet(self, *args, **kwargs):
        return original(self, *args, **kwargs) * louder(0.5)

    kind.forward = patched_resnet
    return lambda: setattr(kind, "forward", original)


def hook(unet):
    """A forward hook on a block."""

    def watching_block(module, args, output):
        return output * louder()

    return unet.up_blocks[1].register_forward_hook(watching_block).remove


def method(unet):
    """Another method on one transformer, which its forward calls."""
    module = unet.up_blocks[1].attentions[0]
    original = module._operate_on_continuous_inputs

    def patched_method(*args, **kwargs):
        states, inner = original(*args, **kwargs)
        return states * louder(), inner

    module._operate_on_continuous_inputs = patched_method
    return lambda: module.__dict__.pop("_operate_on_continuous_inputs", None)


def processor(unet):
    """An attention processor of its own."""
    module = unet.up_blocks[1].attentions[0].transformer_blocks[0].attn1
    original = module.processor

    class LouderProcessor:
        def __call__(self, *args, **kwargs):
            return original(*args, **kwargs) * louder()

    module.processor = LouderProcessor()
    return lambda: setattr(module, "processor", original)


def whole(unet):
    """Another forward on the UNet itself."""
    original = unet.forward

    def patched_unet(*args, **kwargs):
        return tuple(out * louder(1.0) for out in original(*args, **kwargs))

    unet.forward = patched_unet

    def restore():
        unet.forward = original

    return restore


PATCHES = {f.__name__: f for f in (attention, resnets, hook, method, processor, whole)}
applied = []


def patch(kind: str):
    """The route."""
    while applied:
        applied.pop()()
    if kind in PATCHES:
        applied.append(PATCHES[kind](shared.sd_model.unet))
    return {"kind": kind}


script_callbacks.on_app_started(lambda _, app: app.add_api_route("/test/v1/patch", patch, methods=["POST"]))
