"""Sizes and numbers of pictures as a user writes them into the tab."""

from __future__ import annotations

import json
import re

import pytest

from sfast_ext.ui import requests


def labels(sizes, pictures=""):
    return [each.label for each in requests.from_text(sizes, pictures)]


def test_what_a_user_writes_is_understood():
    assert labels("512x512") == ["512x512, 1 picture"]
    assert labels(" 512 x 768,\n1024X1024; 512×768 ,", "1, 2") == [
        "512x768, 1 picture",
        "512x768, 2 pictures",
        "1024x1024, 1 picture",
        "1024x1024, 2 pictures",
    ]


@pytest.mark.parametrize(
    ("sizes", "pictures", "said"),
    [
        ("", "1", "at least one size"),
        (None, None, "at least one size"),
        ("big", "1", "one is 'big'"),
        ("512x512", "two", "one is 'two'"),
        ("512x512", "-1", "one is '-1'"),
        ("512x512", "²", "one is"),
        ("56x512", "", "64 to 4096"),
        ("512x" + "9" * 300, "", "one is '512x9999"),
        ("٥١٢x512", "", "one is"),
    ],
)
def test_what_is_not_valid_is_refused_by_name(sizes, pictures, said):
    with pytest.raises(ValueError, match=said) as caught:
        requests.from_text(sizes, pictures)
    # for a console of any code page
    assert len(str(caught.value)) < 200 and str(caught.value).isascii()


def test_the_schema_says_what_is_taken():
    sizes, pictures = requests.SCHEMA["properties"]["sizes"], requests.SCHEMA["properties"]["pictures"]
    for size in ("64x64", "4096x4096", "512x768"):
        assert re.search(sizes["items"]["pattern"], size)
        for number in (pictures["items"]["minimum"], pictures["items"]["maximum"]):
            assert requests.from_body(json.dumps({"sizes": [size], "pictures": [number]}).encode())
    assert len(requests.from_body(json.dumps({"sizes": ["512x512"], "pictures": pictures["default"]}).encode())) == 1
