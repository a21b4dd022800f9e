"""The comparison with kernels for Ampere: what tells them, and the table; the libraries themselves need a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ampere import attention, cublaslt, eight_bits, run


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize160x128x32_stage4_warpsize2x2x1_tensor16x8x16", True),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_128x128_64x3_tn_align8>", True),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_tn", True),
        ("sm86_xmma_fprop_implicit_gemm_indexed_f16f16", True),
        ("sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x192x64", False),
        ("nvjet_sm90_hsh_168x128_64x5_1x2_h_bz_coopA_bias_TNN", False),
        ("void cutlass::device_kernel<cutlass3x_sm90_tensorop_s64x128x16gemm_f16>", False),
        ("void splitKreduce_kernel<32, 16, int, float>", False),
    ],
)
def test_names_of_kernels_for_ampere(name, wanted):
    assert run.is_for_ampere(name) == wanted


HEAD = {"gpu": "NVIDIA X", "torch": "2.11", "cuda": "13.0", "cudnn": 91900, "commit": "abc"}
ROW = {"what": "linear and residual", "shape": "8×8×32", "candidates": 3}
OURS = {
    "product, mma 128x160": 5.0,
    "product, mma 64x80": 4.0,
    "residual, mma 128x160": 6.0,
    "residual, mma 64x80": 8.0,
}


def test_the_fastest_tile_counts_with_and_without_what_follows():
    assert run.ratios({**ROW, "ours_us": OURS, "theirs_us": 4.8}) == pytest.approx((1.2, 0.8))
    assert run.ratios({**ROW, "ours_us": OURS}) is None


def test_the_table_stands_between_its_marks(tmp_path):
    page = tmp_path / "kernels.md"
    page.write_text(f"Before.\n\n{run.BEGIN}\nold\n{run.END}\n\nAfter.\n", encoding="utf-8")
    rows = [{**ROW, "ours_us": OURS, "theirs_us": 4.8}, {**ROW, "ours_us": OURS}]
    for _ in range(2):
        run.write({**HEAD, "rows": rows}, page)
    text = page.read_text(encoding="utf-8")
    assert "| linear and residual | 8×8×32 | 4.0 | 6.0 | 4.8 | 1.20 | 0.80 |" in text and "old" not in text
    assert "| linear and residual | 8×8×32 | 4.0 | 6.0 | none | | |" in text
    assert text.startswith("Before.\n") and text.endswith("\n\nAfter.\n") and text.count("NVIDIA X") == 1
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError):
        run.write({**HEAD, "rows": rows}, page)


def test_attention_has_its_own_table_and_leaves_the_other_alone(tmp_path):
    page = tmp_path / "kernels.md"
    text = f"{run.BEGIN}\nproducts\n{run.END}\n{attention.BEGIN}\nold\n{attention.END}\n"
    page.write_text(text, encoding="utf-8")
    times = {"mma_attention": 6.0, "FlashAttention-2": 8.0, "cuDNN": 4.0}
    rows = [{"what": "attention", "shape": "8×64×64×40", "us": us} for us in (times, {"mma_attention": 3.0})]
    run.write({**HEAD, "rows": rows}, page)
    text = page.read_text(encoding="utf-8")
    assert "| 8×64×64×40 | 6.0 | 8.0 | none | 4.0 | 0.75 |" in text
    assert "| 8×64×64×40 | 3.0 | none | none | none |  |" in text
    assert "products" in text and "old" not in text and text.count("NVIDIA X") == 1


def test_8_bits_have_their_own_table(tmp_path):
    page = tmp_path / "kernels.md"
    page.write_text(f"{run.BEGIN}\nproducts\n{run.END}\n{eight_bits.BEGIN}\nold\n{eight_bits.END}\n", encoding="utf-8")
    half, int8 = {"mma 128x160": 9.0, "mma 64x80": 8.0}, {"mma 128x160": 4.0, "mma 128x80": 5.0}
    row = {"what": "int8", "operation": "linear and GEGLU", "shape": "8×8×64", "half_us": half, "int8_us": int8}
    row |= {"errors": {"half": 2e-4, "int8": 9e-3}}
    run.write({**HEAD, "rows": [row]}, page)
    text = page.read_text(encoding="utf-8")
    assert "| linear and GEGLU | 8×8×64 | 8.0 | 4.0 | 2.00 | 128x160 | 2.0e-04 | 9.0e-03 |" in text
    assert "products" in text and "old" not in text and text.count("NVIDIA X") == 1


def test_rows_are_quantised_to_half_of_a_step():
    x = torch.randn(5, 64)
    q, scale = eight_bits.quantised(x)
    assert q.dtype == torch.int8 and int(q.abs().amax(-1).min()) == 127
    assert bool(((q * scale[:, None] - x).abs() <= 0.5001 * scale[:, None]).all())


@pytest.mark.gpu
@pytest.mark.parametrize("geglu", [False, True])
def test_products_in_8_bits_agree_with_float32(geglu):
    with run.ways.passing_for((8, 0)):
        found = eight_bits.row(96, 160, 128, geglu)
    assert len(found["half_us"]) == len(found["int8_us"]) == 2 and min(found["int8_us"].values()) > 0
    assert 1e-4 < found["errors"]["half"] < 1e-3 < found["errors"]["int8"] < 3e-2


@pytest.mark.gpu
def test_attentions_agree_with_float32():
    torch.manual_seed(0)
    found = attention.row(2, 96, 77, 40)
    assert "mma_attention" in found["errors"] and len(found["errors"]) > 1
    assert max(found["errors"].values()) < 1.5e-3 and found["us"].keys() == found["errors"].keys()


def test_it_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(run.machine, "device", lambda: torch.device("cpu"))
    assert run.main([]) == 1 and "needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_every_algorithm_of_cublaslt_computes_the_product():
    torch.manual_seed(0)
    a, b = (torch.randn(n, 64, device="cuda").half() for n in (96, 40))
    out = torch.empty(96, 40, device="cuda", dtype=torch.float16)
    product, wanted = cublaslt.Linear(a, b, out), a.float() @ b.float().t()
    found = list(product.configurations())
    assert {each.split_k for each in found} >= {1, 2} and len({each.algorithm for each in found}) > 1
    for each in {each.algorithm: each for each in found}.values():
        out.fill_(float("nan"))
        product.run(each)
        assert (out.float() - wanted).norm() < 1e-3 * wanted.norm(), each
    with pytest.raises(cublaslt.Failed, match="does not take"):
        product.run(found[0]._replace(tile=10_000))
