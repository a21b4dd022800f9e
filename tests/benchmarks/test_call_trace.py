from __future__ import annotations

import json
import sys

from benchmarks import call_trace
from sfast_ext import call_signature
from sfast_ext.report import Report


def test_the_ways_of_three_calls_are_counted(monkeypatch, tmp_path, capsys):
    out = tmp_path / "trace.json"
    monkeypatch.setattr(sys, "argv", ["call_trace", "--calls", "2", "--ways", "--json", str(out)])
    call_trace.main()
    found = json.loads(out.read_text())
    assert len(found) == 3
    for counts in found.values():
        assert counts["files"] > 10 and counts["changes"] > counts["files"] and counts["microseconds"] > 0
    assert "runtime/call_server.py" in capsys.readouterr().out


def test_a_call_into_another_file_and_its_return_are_a_change_each():
    report = Report()

    def call():
        report.count("a")
        report.count("b")
        call_signature.numerical_flags()

    visits = call_trace.traced(call).visits
    assert visits[0] == "report.py" and visits[1] == "call_signature.py" and visits.count("report.py") == 1
    assert call_trace.Trace(["a.py", "b.py", "a.py"]).counts() == {"changes": 2, "files": 2}
