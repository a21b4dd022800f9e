"""What keeps PNG files whole, and a capture from ending the process."""

from __future__ import annotations

from mutations import Mutation

_FILE = "parallel_png.py"
_PNG = "test_parallel_png.py::"
_GUARD = "capture/test_device_guard.py::test_the_first_to_ask_is_a_thread_that_stays"

MUTATIONS = [
    Mutation(
        "the choice of how PNG files are written", _FILE,
        " and wanted():", ":",
        (_PNG + "test_the_users_choice_holds_for_the_next_file",),
    ),
    Mutation(
        "options with which Pillow compresses in another way", _FILE,
        "not any(im.encoderinfo.get(name) for name in _PILLOWS)", "True",
        (_PNG + "test_what_is_pillows",),
    ),
    Mutation(
        "a Pillow that writes PNG in another way", _FILE,
        "        _check(pillows)\n", "",
        (_PNG + "test_a_pillow_that_does_it_otherwise_keeps_its_writer",),
    ),
    Mutation(
        "another writer of PNG files", _FILE,
        "if pillows is not PngImagePlugin._save:", "if pillows is None:",
        (_PNG + "test_another_writer_is_left_alone",),
    ),
    Mutation(
        "a writer that was laid over ours", _FILE,
        'if Image.SAVE.get("PNG") is save:', "if True:",
        (_PNG + "test_a_writer_over_ours_stays_when_ours_goes",),
    ),
    Mutation(
        "the writer after the extension", _FILE,
        "if not removed and ", "if ",
        (_PNG + "test_a_writer_over_ours_stays_when_ours_goes",),
    ),
    Mutation(
        "PNG files that could not be compressed", _FILE,
        '        except Exception as exc:\n            logger.debug("a PNG',
        '        except ZeroDivisionError as exc:\n            logger.debug("a PNG',
        (_PNG + "test_an_exception_loses_no_image",),
    ),
    Mutation(
        "the row above a band", _FILE,
        "rows[start - 1] if start else nothing", "nothing",
        (_PNG + "test_any_number_of_bands",),
    ),
    Mutation(
        "a guard of CUDA devices that outlives threads", "capture/fake_trace.py",
        "    device_guard.outlive_threads()\n", "", (_GUARD,),
    ),
    Mutation(
        "the thread that keeps it", "capture/device_guard.py",
        "        threading.Event().wait()\n", "", (_GUARD,),
    ),
]  # fmt: skip
