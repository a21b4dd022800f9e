from __future__ import annotations

import contextlib
import threading
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from sfast_ext.tools.lib import Unavailable, changes, models, pipelines


@pytest.mark.parametrize("name", models.NAMES)
def test_tiny_shapes_run_and_stay_sane(name, tiny_unet, unet_inputs):
    unet = tiny_unet(name)
    args, kwargs = unet_inputs(unet, 64, 72, 2)
    with torch.no_grad():
        output = unet(*args, **kwargs)[0]
    assert output.shape == (4, 4, 9, 8)
    assert 0.1 < float(output.std()) < 10


@pytest.mark.parametrize("name", models.NAMES)
def test_full_and_tiny_shapes_differ_in_size_only(name):
    full, tiny = models.unet_config(name), models.unet_config(f"tiny-{name}")
    sizes = {
        "sample_size",
        "norm_num_groups",
        "layers_per_block",
        "block_out_channels",
        "cross_attention_dim",
        "attention_head_dim",
        "transformer_layers_per_block",
        "addition_time_embed_dim",
        "projection_class_embeddings_input_dim",
    }
    assert {k: v for k, v in full.items() if k not in sizes} == {k: v for k, v in tiny.items() if k not in sizes}
    assert len(full["block_out_channels"]) == len(tiny["block_out_channels"])


def test_an_unknown_name_is_named():
    with pytest.raises(ValueError, match="sd99"):
        models.unet_config("sd99")


def test_the_same_seed_gives_the_same_weights(tiny_unet):
    one, two, other = tiny_unet(), tiny_unet(), tiny_unet(seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert not any(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))
    with torch.no_grad():
        one.conv_in.weight.zero_()
    assert not torch.equal(one.conv_in.weight, tiny_unet().conv_in.weight)


def test_making_a_model_leaves_torch_as_it_was(tiny_unet):
    models.random_unet("tiny-sd21")
    assert not torch.equal(torch.nn.Linear(4, 4).weight, torch.nn.Linear(4, 4).weight)


def test_another_thread_s_layers_are_initialised_meanwhile():
    made = []

    def make():
        torch.manual_seed(5)
        made.append(torch.nn.Linear(16, 16).weight)

    for inside in (models.without_initialisation(torch.device("cpu")), contextlib.nullcontext()):
        with inside:
            thread = threading.Thread(target=make)
            thread.start()
            thread.join()
    assert torch.equal(*made)


def test_a_lora_in_place_keeps_parameters_and_a_replaced_one_does_not(tiny_unet):
    unet = tiny_unet()
    before = [(weight, weight.clone()) for _, weight in changes.targets(unet)]
    assert changes.lora_in_place(unet, seed=1) == len(before) > 10
    for (_, now), (weight, values) in zip(changes.targets(unet), before):
        assert now is weight and not torch.equal(now, values)
    changes.lora_replaced(unet, seed=1)
    assert not any(now is weight for (_, now), (weight, _) in zip(changes.targets(unet), before))


def test_a_lora_of_diffusers_leaves_the_tree_as_it_was(tiny_unet, unet_inputs):
    pytest.importorskip("peft")
    unet = tiny_unet()
    names = [name for name, _ in unet.named_modules()]
    args, kwargs = unet_inputs(unet)
    with torch.no_grad():
        before = unet(*args, **kwargs)[0]
    changes.lora_of_diffusers(unet, seed=1)
    assert [name for name, _ in unet.named_modules()] == names
    with torch.no_grad():
        assert float((unet(*args, **kwargs)[0] - before).norm() / before.norm()) > 0.05


def test_a_checkpoint_by_way_of_the_cpu_arrives(tiny_unet):
    unet = tiny_unet()
    state = models.random_state(unet, seed=5)
    changes.load_checkpoint_by_cpu(unet, state)
    assert all(torch.equal(v, state[k]) for k, v in unet.state_dict().items())


def test_the_tokenizer_needs_no_download():
    tokenizer = pipelines.byte_tokenizer()
    one, two = (tokenizer(text, padding="max_length", max_length=77)["input_ids"] for text in ("a fox", "an ox"))
    assert len(one) == len(two) == 77 and one != two


def test_a_unet_comes_back_from_a_folder(tmp_path, tiny_unet):
    unet = tiny_unet("sd15-inpaint")
    unet.save_pretrained(tmp_path / "pipeline" / "unet")
    for path in (tmp_path / "pipeline", tmp_path / "pipeline" / "unet"):
        found = pipelines.load_unet(str(path), dtype=torch.float32, device=torch.device("cpu"))
        assert all(torch.equal(a, b) for a, b in zip(unet.parameters(), found.parameters()))


@pytest.mark.parametrize(
    ("name", "width", "context", "channels"),
    [
        ("sd15", 320, 768, 4),
        ("sd15-inpaint", 320, 768, 9),
        ("sd21", 320, 1024, 4),
        ("sdxl", 320, 2048, 4),
        ("sdxl-refiner", 384, 1280, 4),
    ],
)
def test_a_checkpoint_is_known_by_its_shapes(tmp_path, name, width, context, channels):
    path = tmp_path / "model.safetensors"
    prefix = "model.diffusion_model."
    save_file(
        {
            f"{prefix}input_blocks.0.0.weight": torch.zeros(width, channels, 3, 3),
            f"{prefix}input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": torch.zeros(8, context),
        },
        path,
    )
    assert pipelines.checkpoint_name(str(path)) == name


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_file({"lora_unet.lora_down.weight": torch.zeros(4, 4)}, path)
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    for load in (pipelines.load_unet, pipelines.load_pipeline):
        with pytest.raises(Unavailable, match="no checkpoint"):
            load(str(path), **where)
        with pytest.raises(Unavailable, match="neither"):
            load(str(tmp_path / "model.ckpt"), **where)
        (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:-1])
        with pytest.raises(Unavailable, match="damaged"):
            load(str(tmp_path / "cut.safetensors"), **where)


def test_what_a_library_raises_of_a_file_is_about_the_file(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, file)
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    for raised in (KeyError("x"), OSError("offline\nmore"), RuntimeError("size mismatch"), AssertionError()):
        monkeypatch.setattr(pipelines, "checkpoint_name", mock.Mock(side_effect=raised))
        with pytest.raises(Unavailable, match="cannot be loaded") as refused:
            pipelines.load_pipeline(str(file), **where)
        assert "\n" not in str(refused.value) and str(file) in str(refused.value)
    monkeypatch.setattr(pipelines, "checkpoint_name", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        pipelines.load_unet(str(file), **where)
    for name in ("sdxl-refiner", "sd15-inpaint"):
        monkeypatch.setattr(pipelines, "checkpoint_name", lambda path, name=name: name)
        with pytest.raises(Unavailable, match=f"checkpoint of {name}, which makes no image of a text alone"):
            pipelines.load_pipeline(str(file), **where)
