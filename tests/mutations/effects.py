"""What a forward reads and writes, in addition to its arguments and weights."""

from __future__ import annotations

from mutations import Mutation

_READ = ("capture/test_real_tensors.py::test_a_number_of_a_real_tensor_is_no_part_of_a_plan",)
_LIVE = ("capture/test_real_tensors.py::test_a_run_on_real_tensors_that_reads_a_number_is_not_recorded",)
_WRITTEN = (
    "capture/test_real_tensors.py::test_nothing_is_written_to_a_real_tensor",
    "capture/test_functionalize.py::test_a_write_to_a_weight_or_an_argument_under_another_name_is_refused",
)
_SAME = _WRITTEN[1:]
_COPY = ("capture/test_functionalize.py::test_a_write_to_a_copy_is_no_write_to_a_weight_or_an_argument",)
_KEPT = ("test_state_changes.py::test_what_a_processor_keeps_is_what_it_keeps_without_us",)
_ELSEWHERE = ("test_state_changes.py::test_what_is_kept_elsewhere_is_what_is_kept_without_us",)
_REHEARSED = (
    "test_rehearsed_state.py::test_the_first_call_may_be_a_rehearsal",
    "test_rehearsed_state.py::test_a_rehearsal_leaves_what_a_processor_keeps_as_it_was",
    "test_rehearsed_state.py::test_the_first_call_may_be_a_rehearsal",
)
_CONTAINERS = "test_argument_containers.py::"

_IMPORTED = (
    "behaviour/test_imports.py::test_what_a_forward_keeps_in_a_module_that_it_imports_is_kept_at_each_call",
)

MUTATIONS = [
    Mutation(
        "data of a real tensor that is replaced", "capture/real_tensors.py",
        "if func == _SET_DATA:", "if False:",
        ("capture/test_real_tensors.py::test_the_data_of_a_real_tensor_is_not_replaced",),
    ),
    Mutation(
        "a weight's value that Python reads without an operation is part of a plan",
        "capture/real_tensors.py",
        "            self.read(value_read(func, args, kwargs or {}))",
        "            pass",
        _READ,
    ),
    Mutation(
        "a weight's value that an operation reads is part of a plan",
        "capture/real_tensors.py",
        "            real.read(real_tensor_in((args, kwargs)))",
        "            pass",
        _READ,
    ),
    Mutation(
        "what follows from a literal and a weight may be read",
        "capture/real_tensors.py",
        "                slot.constant = None",
        "                pass",
        _READ,
    ),
    Mutation(
        "a weight is written to while the forward is recorded",
        "capture/fake_trace.py",
        "                self.real.write(func, args, kwargs)",
        "                pass",
        ("capture/test_real_tensors.py::test_nothing_is_written_to_one_on_a_torch_that_hides_its_recording_mode",),
    ),
    Mutation(
        "a run on real tensors that reads a number is a plan",
        "capture/live_trace.py",
        "            self._trace.note_read()",
        "            pass",
        _LIVE,
    ),
    Mutation(
        "each conversion is a copy",
        "capture/functionalize.py",
        '    return converts or given.get("copy") is True',
        "    return True",
        _SAME,
    ),
    Mutation(
        "no conversion is a copy",
        "capture/functionalize.py",
        '    return converts or given.get("copy") is True',
        "    return False",
        _COPY,
    ),
    Mutation(
        "a write to a view of one of several tensors is taken for one to a new tensor",
        "capture/functionalize.py",
        "        if source.target in _OF_A_LIST and not _multiplies(source):",
        "        if False:",
        _SAME,
    ),
    Mutation(
        "a forward that changed state gets a plan",
        "runtime/call_server.py",
        "            if not self._builder.unchanged(lookup, run.state):",
        "            if False:",
        _KEPT,
    ),
    Mutation(
        "what a capture changed stays",
        "capture/capture.py",
        "        left_behind, passing = before.put_back(ignored_too=True)",
        "        left_behind, passing = None, False",
        ("capture/test_capture.py::test_a_refused_capture_leaves_no_state_behind",),
    ),
    Mutation(
        "what another thread wrote is overwritten",
        "capture/state.py",
        "            maybe_others = theirs and not alone and not _has_fake(undo.now)",
        "            maybe_others = False",
        ("test_state_put_back.py::test_another_thread_may_write_to_what_the_program_holds_while_a_plan_is_made",),
    ),
    Mutation(
        "a stage that is shown is state of the forward",
        "preparation.py",
        "    return any(name == each and",
        "    return False and any(name == each and",
        ("test_shown_stages.py::test_a_stage_that_is_shown_during_the_capture_is_no_state_of_the_forward",),
    ),
    Mutation(
        "whatever is where a stage is shown is no state",
        "preparation.py",
        "    return any(name == each and (",
        "    return any((",
        ("test_shown_stages.py::test_what_else_changes_beside_the_stage_is_noticed",),
    ),
    Mutation(
        "a default in which a host's blocks note where they are is state",
        "capture/state.py",
        "    return [value for name, value in defaults.items() if name in names]",
        "    return []",
        ("test_noted_defaults.py::test_the_first_call_gets_its_plan",),
    ),
    Mutation(
        "no default is state",
        "capture/state.py",
        "    return [value for name, value in defaults.items() if name in names]",
        "    return list(defaults.values())",
        ("test_noted_defaults.py::test_a_default_that_the_host_does_not_name_is_state",),
    ),
    Mutation(
        "code that is found by name is not looked into",
        "capture/reachable.py",
        "                    self._globals(function)",
        "                    pass",
        _ELSEWHERE,
    ),
    Mutation(
        "modules that a function imports are no state",
        "capture/reachable.py",
        "        for name in imported_names(function):",
        "        for name in ():",
        _IMPORTED,
    ),
    Mutation(
        "modules in packages are no state",
        "capture/reachable.py",
        "                self._in_module((module.__name__, name), value, names, entered, depth + 1)",
        "                pass",
        _IMPORTED,
    ),
    Mutation(
        "objects in place of modules are no state",
        "capture/reachable.py",
        "            self._waiting.append((where, module))",
        "            pass",
        ("behaviour/test_imports.py::test_what_a_forward_keeps_in_an_object_in_place_of_a_module_is_kept_at_each_call",),
    ),
    Mutation(
        "what a module does when it is asked is no state",
        "capture/reachable.py",
        '        self._waiting.append(((module.__name__, "__getattr__"), inside.get("__getattr__")))',
        "        pass",
        ("behaviour/test_imports.py::test_what_a_modules_own_getattr_keeps_is_kept_at_each_call",),
    ),
    Mutation(
        "new attributes of modules are no state",
        "capture/reachable.py",
        "        for name in (names & self._stored) - inside.keys():",
        "        for name in ():",
        _IMPORTED,
    ),
    Mutation(
        "new attributes of objects are no state",
        "capture/reachable.py",
        "            for name in self._stored - attributes.keys():",
        "            for name in ():",
        ("behaviour/test_imports.py::test_an_attribute_that_a_forward_makes_on_an_object_of_a_module_is_kept_at_each_call",),
    ),
    Mutation(
        "attributes of classes are no state",
        "capture/reachable.py",
        "            self.kind(owner)",
        "            pass",
        _ELSEWHERE,
    ),
    Mutation(
        "iterators, arrays and generators are no state",
        "capture/reachable.py",
        "        read = counters.reader(value)",
        "        read = None",
        _KEPT,
    ),
    Mutation(
        "a tensor that is written in place is no state",
        "capture/state.py",
        "            if tensor._version != version:",
        "            if False:",
        _REHEARSED[1:],
    ),
    Mutation(
        "a run that is recorded and fails is repeated from where it ended",
        "capture/live_trace.py",
        "                undo()",
        "                pass",
        ("test_state_put_back.py::test_a_run_that_is_recorded_and_fails_is_repeated_from_where_it_began",),
    ),
    Mutation(
        "a rehearsal leaves what its first call changed",
        "runtime/call_server.py",
        "                if rehearsing():\n                    run.state.put_back()",
        "                if False:\n                    run.state.put_back()",
        _REHEARSED[:1],
    ),
    Mutation(
        "a rehearsal of a bypassed call leaves what it changed",
        "runtime/call_server.py",
        "            return self._leaving_no_trace(lambda: self.run_original(*args, **kwargs))",
        "            return self.run_original(*args, **kwargs)",
        _REHEARSED[1:2],
    ),
    Mutation(
        "a rehearsal of a call that gets no plan leaves what it changed",
        "runtime/call_server.py",
        "return self._leaving_no_trace(lambda: self._without_plan(building, args, kwargs, build=False))",
        "return self._without_plan(building, args, kwargs, build=False)",
        _REHEARSED[2:],
    ),
    Mutation(
        "fake tensors stay in a hidden place",
        "capture/capture.py",
        "    elsewhere = leftovers.take_out(made, graph_module)",
        "    elsewhere = None",
        ("capture/test_leftovers.py::test_a_fake_tensor_in_a_hidden_place_is_taken_out_and_the_forward_refused",),
    ),
    Mutation(
        "a plan takes nothing out of a caller's list",
        "runtime/call_server.py",
        "            arguments.apply(lookup.plan.edits, args, kwargs)",
        "            pass",
        (_CONTAINERS + "test_what_is_taken_out_of_a_container_is_taken_out_by_a_plan",),
    ),
    Mutation(
        "a list that was put into is taken for one that was taken out of",
        "capture/arguments.py",
        "    return None if None in found else tuple(found)",
        "    return tuple(each for each in found if each is not None)",
        (_CONTAINERS + "test_what_is_put_into_a_container_is_put_there_by_the_original",),
    ),
    Mutation(
        "a list that is there twice is taken for two",
        "runtime/plan_finder.py",
        "        elif plan.edits and not distinct(args, kwargs):",
        "        elif False:",
        (_CONTAINERS + "test_a_list_that_is_there_twice_is_changed_by_the_original",),
    ),
    Mutation(
        "the original runs again on lists that it emptied, after memory was freed",
        "runtime/call_server.py",
        "                before.put_back()\n            return context",
        "                pass\n            return context",
        (_CONTAINERS + "test_the_original_that_runs_again_after_memory_was_freed_gets_its_lists_back",),
    ),
]
