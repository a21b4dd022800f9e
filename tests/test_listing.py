"""The entries for the lists of extensions obey the rules of their lists, and issue forms those of GitHub."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from sfast_ext.ui import settings, settings_table

ROOT = Path(__file__).resolve().parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))

# from tags.json and .github/scripts/validate.py of AUTOMATIC1111/stable-diffusion-webui-extensions, August 2026
TAGS = {
    "script", "localization", "tab", "dropdown", "ads", "installed", "training", "models", "UI related", "prompting",
    "editing", "manipulations", "online", "animation", "query", "science", "extras",
}  # fmt: skip
REQUIRED = {"name", "url", "description", "tags"}
URL = re.compile(r"(https://[^ ]+?)(?:(?:\.git)$|$)")
# what SD.Next's own list shows of a description
LONGEST = 200 + 64


def entry(name):
    return json.loads((ROOT / "docs" / "listing" / name).read_text(encoding="utf-8"))


def flaws(found):
    """What the index's own validation says of an entry."""
    said = [f"{key} is missing" for key in REQUIRED - found.keys()]
    said += [f"{tag} is no tag" for tag in found.get("tags", []) if tag not in TAGS]
    said += [] if URL.match(found.get("url", "")) else ["the URL is not valid"]
    # what people say of entries in reviews, and what the template has
    said += ["installed is the WebUI's own tag"] if "installed" in found.get("tags", []) else []
    said += ["unknown fields"] if found.keys() - REQUIRED else []
    said += ["no description"] if not 40 <= len(found.get("description", "")) <= LONGEST else []
    return said


def test_the_entry_of_the_index_is_valid():
    found = entry("a1111.json")
    assert flaws(found) == []
    assert found["description"].isascii() and found["name"] == settings.SECTION[1]


@pytest.mark.parametrize(
    "change",
    [{"tags": ["speed"]}, {"tags": ["installed"]}, {"url": "http://x"}, {"description": ""}, {"added": "2026"}],
)
def test_an_entry_that_is_not_valid_is_found(change):
    assert flaws({**entry("a1111.json"), **change})


def test_sdnext_s_entry_is_of_the_same_repository():
    found = entry("sdnext.json")
    # 1 is the best of its five states
    assert found.keys() == {"url", "status", "note"} and found["status"] in range(1, 6)
    # the list joins its entries to those of the index by this
    assert found["url"] == entry("a1111.json")["url"]


def test_no_server_is_contacted_so_the_tag_online_is_not_needed():
    reaching = {"urllib.request", "http.client", "socket", "requests", "httpx", "aiohttp", "huggingface_hub", "ftplib"}
    found = []
    for file in [*(ROOT / "sfast_ext").rglob("*.py"), ROOT / "install.py", *(ROOT / "scripts").glob("*.py")]:
        if "tools" in file.parts:
            continue  # commands of the developers
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found += [f"{file.name}: {name}" for name in names if name in reaching]
    assert found == []
    for file in (ROOT / "javascript").glob("*.js"):
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")  # the name of SVG's elements
        assert not re.search("https?:", text), file.name


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_issue_forms_are_what_github_takes_and_ask_for_the_report(form):
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert found["name"] and found["description"] and found["body"]
    fields = [each for each in found["body"] if each["type"] != "markdown"]
    assert len({each["id"] for each in fields}) == len(fields)
    for each in found["body"]:
        assert each["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        attributes = each["attributes"]
        assert attributes["value"] if each["type"] == "markdown" else attributes["label"]
        options = attributes.get("options", [])
        # GitHub refuses a form whose options are not text, as an unquoted "No" is not
        assert all(isinstance(option, str) for option in options) and (each["type"] != "dropdown" or options)
    report = next(each for each in fields if each["id"] == "report")
    assert report["attributes"]["label"] == "The copied report"
    assert '"Copy a report"' in report["attributes"]["description"]
    assert report.get("validations", {}).get("required", False) == (form.stem != "4_wish")


def test_there_are_forms():
    assert len(FORMS) == 4


def test_forms_and_docs_name_buttons_as_the_tab_does():
    tab = (ROOT / "sfast_ext" / "ui" / "tab.py").read_text(encoding="utf-8")
    for name in ("Copy a report", "Measure"):
        assert f'gradio.Button("{name}"' in tab
    text = "".join(form.read_text(encoding="utf-8") for form in FORMS)
    for setting in (settings_table.SETTINGS[0], settings_table.LOG_LEVEL):
        assert setting.label in text
