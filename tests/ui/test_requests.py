"""Sizes, numbers of images and lengths of the prompt as a user writes them into the tab."""

from __future__ import annotations

import json
import re

import pytest

from sfast_ext.ui import requests


def labels(sizes, images=""):
    return [each.label for each in requests.from_text(sizes, images)]


def test_what_a_user_writes_is_understood():
    assert labels("512x512") == ["512x512, 1 image"]
    assert labels(" 512 x 768,\n1024X1024; 512×768 ,", "1, 2") == [
        "512x768, 1 image",
        "512x768, 2 images",
        "1024x1024, 1 image",
        "1024x1024, 2 images",
    ]


def test_each_length_of_the_prompt_is_combined_with_each_size():
    found = requests.from_text("512x512, 64x64", "1", ["150", "75"])
    assert [(each.width, each.tokens, each.tokens_of_model) for each in found] == [
        (512, 150, 154),
        (512, 75, 77),
        (64, 150, 154),
        (64, 75, 77),
    ]
    (last,) = requests.from_text("512x512", "1", None)
    assert last.tokens is None and last.tokens_of_model is None


@pytest.mark.parametrize(
    "tokens", ['["76"]', "[76]", "[75.0]", "[true]", "[null]", "[]", "[75, 75, 75, 75]", "75", "null"]
)
def test_other_lengths_are_refused(tokens):
    with pytest.raises(ValueError, match="tokens must be"):
        requests.from_body(b'{"sizes": ["512x512"], "tokens": %s}' % tokens.encode())


@pytest.mark.parametrize("tokens", [["76"], ["75", "<b>"], [""]])
def test_other_lengths_from_the_page_are_refused(tokens):
    with pytest.raises(ValueError, match="tokens must be"):
        requests.from_text("512x512", "1", tokens)


@pytest.mark.parametrize(
    ("sizes", "images", "said"),
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
def test_what_is_not_valid_is_refused_by_name(sizes, images, said):
    with pytest.raises(ValueError, match=said) as caught:
        requests.from_text(sizes, images)
    # for a console of any code page
    assert len(str(caught.value)) < 200 and str(caught.value).isascii()


def test_the_schema_says_what_is_taken():
    sizes, images = requests.SCHEMA["properties"]["sizes"], requests.SCHEMA["properties"]["images"]
    for size in ("64x64", "4096x4096", "512x768"):
        assert re.search(sizes["items"]["pattern"], size)
        for number in (images["items"]["minimum"], images["items"]["maximum"]):
            assert requests.from_body(json.dumps({"sizes": [size], "images": [number]}).encode())
    assert len(requests.from_body(json.dumps({"sizes": ["512x512"], "images": images["default"]}).encode())) == 1
    tokens = requests.SCHEMA["properties"]["tokens"]["items"]["enum"]
    assert len(requests.from_body(json.dumps({"sizes": ["512x512"], "tokens": tokens}).encode())) == len(tokens) == 3


def test_the_former_name_of_a_field_is_taken_in_its_place():
    asked = {"sizes": ["512x512", "64x64"], "images": [1, 4]}
    former = {"sizes": asked["sizes"], "pictures": asked["images"]}
    found = requests.from_body(json.dumps(former).encode())
    assert found == requests.from_body(json.dumps(asked).encode()) and [each.images for each in found] == [1, 4, 1, 4]
    for wrong in ([], [17], None):
        with pytest.raises(ValueError, match="images must be"):
            requests.from_body(json.dumps({**former, "pictures": wrong}).encode())
    for twice in (asked["images"], [2], None):
        with pytest.raises(ValueError, match="images and pictures, .* are both there"):
            requests.from_body(json.dumps({**asked, "pictures": twice}).encode())


def test_the_schema_has_the_former_name_as_one():
    former, images = (requests.SCHEMA["properties"][name] for name in ("pictures", "images"))
    assert former["deprecated"] and "deprecated" not in images
    # a client may send defaults by itself, and both at once are refused
    assert "default" not in former and former["items"] == images["items"]
