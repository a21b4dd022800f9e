"""What values hold: settings, closures, defaults, globals, attributes of classes."""

from __future__ import annotations

from mutations import Mutation

_FILE = "behaviour/test_values.py"
_PLACES = "behaviour/test_value_places.py"
_MADE = "behaviour/test_constructors.py"
_PACKAGES = "behaviour/test_installed_packages.py"
_INSTALLED = (f"{_PACKAGES}::test_a_setting_of_an_installed_package_that_changes_in_place_is_seen",)
_OF_LAYERS = (f"{_PACKAGES}::test_a_value_of_a_layer_that_is_replaced_is_seen",)
_REPLACED = (f"{_FILE}::test_a_setting_that_is_replaced_changes_the_key",)
_IN_PLACE = (f"{_FILE}::test_a_setting_that_changes_in_place_is_seen_at_the_next_call",)
_NAMED = (f"{_FILE}::test_a_value_that_cannot_be_compared_is_named",)
_FOUND = (f"{_PLACES}::test_a_value_is_compared_wherever_the_code_finds_it",)
_IMPORTS = "behaviour/test_imports.py"
_PATCHED = (f"{_PLACES}::test_a_class_of_settings_that_is_patched_is_seen",)
_NOTES = "behaviour/test_ignored_globals.py"

MUTATIONS = [
    Mutation(
        "globals that code sets and looks up", "behaviour/code_values.py",
        "names -= ignored & only_set(function.__code__)", "names -= ignored",
        (f"{_NOTES}::test_what_code_looks_up_is_part_of_it_whatever_the_host_says",),
    ),
    Mutation(
        "globals that code sets and nobody vouches for", "behaviour/code_values.py",
        "names -= ignored & only_set(function.__code__)", "names -= only_set(function.__code__)",
        (f"{_NOTES}::test_another_name_that_it_sets_is_part_of_it",),
    ),
    Mutation(
        "globals of the same name in another module", "behaviour/code_values.py",
        'if module == around.get("__name__")', "if True",
        (f"{_NOTES}::test_what_code_only_sets_is_no_part_of_the_key_if_the_host_names_it",),
    ),
    Mutation(
        "globals that code has as a text", "behaviour/reach.py",
        "others = {*_strings(code.co_consts), *(", "others = {*(",
        (f"{_NOTES}::test_what_code_looks_up_is_part_of_it_whatever_the_host_says",),
    ),
    Mutation(
        "modules that a function imports", "behaviour/code_values.py",
        "for name in sorted({*imported_names(function)}):", "for name in ():",
        (f"{_IMPORTS}::test_a_value_in_a_module_that_a_forward_imports_is_seen_at_the_next_call",),
    ),
    Mutation(
        "what a module computes when it is asked", "behaviour/code_values.py",
        'if isinstance(made := home.get("__getattr__"), FunctionType):', "if False:",
        (f"{_IMPORTS}::test_what_a_module_computes_when_it_is_asked_is_seen_at_the_next_call",),
    ),
    Mutation(
        "classes of modules of Python", "behaviour/code_values.py",
        "if type(module) is not ModuleType: found.append", "if False: found.append",
        (f"{_IMPORTS}::test_what_a_module_computes_when_it_is_asked_is_seen_at_the_next_call",),
    ),
    Mutation(
        "functions of operators", "behaviour/value_types.py",
        "if isinstance(value, _OPERATORS):", "if False:",
        _FOUND,
    ),
    Mutation(
        "functions behind decorators of torch", "behaviour/code_values.py",
        "inside = [layer for layer in layers(value) if not self._is_theirs(layer, own)]", "inside = []",
        (f"{_IMPORTS}::test_a_value_behind_a_decorator_is_seen_at_the_next_call",),
    ),
    Mutation(
        "values behind decorators that cannot be compared", "behaviour/code_values.py",
        "self.names, outer if wrapped else strict)", "self.names, strict)",
        (f"{_IMPORTS}::test_a_value_behind_a_decorator_that_cannot_be_compared_is_named",),
    ),
    Mutation(
        "classes with decorated methods", "behaviour/code_values.py",
        "for layer in of if written_by(layer) == own)", "for layer in of)",
        (f"{_IMPORTS}::test_a_value_behind_a_decorator_that_cannot_be_compared_is_named",),
    ),
    Mutation(
        "classes of objects", "behaviour/contents.py",
        "and list(map(type, self._typed)) == self._kinds", "and True",
        (f"{_MADE}::test_an_object_that_is_given_another_class_is_another",),
    ),
    Mutation(
        "what constructors read", "behaviour/reader.py",
        "key += self.values.made()", "pass",
        (f"{_MADE}::test_what_makes_an_object_is_read",),
    ),
    Mutation(
        "code of a function that is replaced", "behaviour/code_values.py",
        "key.append(function.__code__)", "pass",
        (f"{_MADE}::test_a_function_whose_code_is_replaced_is_another",),
    ),
    Mutation(
        "attributes of members of an enumeration", "behaviour/values.py",
        "return member if is_common(kind) else (member, self._of_member(value, kind, where, names, strict))",
        "return member",
        _FOUND,
    ),
    Mutation(
        "values within a generation", "behaviour/fingerprint.py",
        "and self.contents.unchanged() and self.torch_check", "and self.torch_check",
        _IN_PLACE,
    ),
    Mutation(
        "values where no generations are told", "behaviour/fingerprint.py",
        "or not self.contents.unchanged() or", "or",
        (f"{_PLACES}::test_without_generations_it_is_seen_at_the_next_call_as_well",),
    ),
    Mutation(
        "values that cannot be compared", "behaviour/values.py",
        "self.unknown.append(Unknown(where, value, why))", "pass",
        _NAMED,
    ),
    Mutation(
        "values that cannot be compared, as a reason", "behaviour/key.py",
        "(value.reason() for value in read.unknown)", "()",
        _NAMED,
    ),
    Mutation(
        "state that a class hides", "behaviour/values.py",
        "elif hides_state(kind):", "elif False:",
        _NAMED,
    ),
    Mutation(
        "too many items", "behaviour/values.py",
        "if len(value) > min(MAX_ITEMS, self._left):", "if False:",
        _NAMED,
    ),
    Mutation(
        "too many bytes", "behaviour/values.py",
        "if size > MAX_BYTES:", "if False:",
        _NAMED,
    ),
    Mutation(
        "zeros and types of numbers", "behaviour/value_types.py",
        "return (kind, repr(value)) if kind in BY_WORDS else (kind, value)", "return value",
        _REPLACED,
    ),
    Mutation(
        "types of numbers in place", "behaviour/value_types.py",
        "    if kind is not type(then):\n        return False\n", "    if now == then:\n        return True\n",
        _REPLACED,
    ),
    Mutation(
        "slots", "behaviour/values.py",
        "        if slots:\n", "        if False:\n",
        _REPLACED,
    ),
    Mutation(
        "arrays", "behaviour/values.py",
        "return self.contents.plain(lambda: buffer_content(value))", "return None",
        _IN_PLACE,
    ),
    Mutation(
        "sets and deques in place", "behaviour/values.py",
        "items = [*self.contents.objects(lambda: tuple(base.__iter__(value)))]", "items = [*value]",
        _IN_PLACE,
    ),
    Mutation(
        "lengths of lists", "behaviour/contents.py",
        "and list(map(len, self._lists)) == lists\n", "\n",
        _IN_PLACE,
    ),
    Mutation(
        "items of lists", "behaviour/contents.py",
        "and _same(chain.from_iterable(self._lists), self._items)\n", "\n",
        _IN_PLACE,
    ),
    Mutation(
        "keys of dictionaries", "behaviour/contents.py",
        "and _same(chain.from_iterable(self._dicts), self._keys)\n", "\n",
        _IN_PLACE,
    ),
    Mutation(
        "values of dictionaries", "behaviour/contents.py",
        "and _same(chain.from_iterable(self._views), self._values)\n", "\n",
        _IN_PLACE,
    ),
    Mutation(
        "names in modules and classes", "behaviour/contents.py",
        "self._names_unchanged()\n                and", "True\n                and",
        _FOUND,
    ),
    Mutation(
        "names that a class gets later", "behaviour/contents.py",
        "all(len(inside) == size for inside, size in self._owners)\n", "True\n",
        _PATCHED,
    ),
    Mutation(
        "methods of settings", "behaviour/reader.py",
        "if more == names and len(kinds) == known and not", "if more == names and not",
        _PATCHED,
    ),
    Mutation(
        "closures of functions among values", "behaviour/code_values.py",
        "if function.__closure__:", "if False:",
        _FOUND,
    ),
    Mutation(
        "defaults in the key", "behaviour/code_values.py",
        "            if defaults:\n", "            if False:\n",
        _FOUND,
    ),
    Mutation(
        "defaults in place", "behaviour/code_values.py",
        "self.contents.objects(lambda: (function.__defaults__, function.__kwdefaults__, function.__code__))", "pass",
        _FOUND,
    ),
    Mutation(
        "attributes of functions", "behaviour/code_values.py",
        "if vars(function) and strict:", "if False:",
        _FOUND,
    ),
    Mutation(
        "globals", "behaviour/code_values.py",
        "key += self._globals(function, strict)", "pass",
        _FOUND,
    ),
    Mutation(
        "other modules", "behaviour/code_values.py",
        "if of in COMMON or depth >= _MAX_MODULE_DEPTH or (not strict and theirs):", "if True:",
        _FOUND,
    ),
    Mutation(
        "properties of classes", "behaviour/code_values.py",
        "[] if type(kind) is type else self._inside(type(kind), looked, strict)", "[]",
        _FOUND,
    ),
    Mutation(
        "context variables", "behaviour/values.py",
        "(content,) = self.contents.objects(lambda: (value.get(None),))", "content = None",
        _FOUND,
    ),
    Mutation(
        "the model's own forward that was wrapped before", "behaviour/reader.py",
        'key.append(values.function(self.below, "the forward of the model"))', "pass",
        (f"{_PLACES}::test_a_wrapper_beneath_the_accelerated_forward_is_read",),
    ),
    Mutation(
        "a block with a value that cannot be compared", "behaviour/values.py",
        'return ("unknown", object()) if strict else None', 'return ("unknown", type(value))',
        (f"{_FILE}::test_blocks_with_other_settings_have_another_structure",),
    ),
    Mutation(
        "classes of settings in an installed package", "behaviour/code_values.py",
        "settings = [] if issubclass(kind, Enum) else self._settings(kind, looked)", "settings = []",
        _INSTALLED,
    ),
    Mutation(
        "a user's file in a folder of installed packages", "behaviour/value_types.py",
        "path.relative_to(each).as_posix() in _installed(each)", "bool(_installed(each))",
        (f"{_PACKAGES}::test_which_files_are_an_installed_package_s",),
    ),
    Mutation(
        "objects that an installed package holds", "behaviour/code_values.py",
        "return is_of_library(kind) and (callable(value)", "return (callable(value)",
        _INSTALLED,
    ),
    Mutation(
        "modules that an installed package holds", "behaviour/code_values.py",
        'theirs = library and own != ""', "theirs = of != own",
        _INSTALLED,
    ),
    Mutation(
        "arrays of objects in an installed package", "behaviour/values.py",
        "if not strict and value.dtype == object:", "if False:",
        _INSTALLED,
    ),
    Mutation(
        "settings of a class that can be called", "behaviour/code_values.py",
        'methods = bool(functions) and hasattr(type(value), "__get__")', "methods = bool(functions)",
        (f"{_PACKAGES}::test_a_setting_of_an_installed_package_that_is_replaced_is_seen",),
    ),
    Mutation(
        "classes within classes", "behaviour/code_values.py",
        '''                elif not name.startswith("__"):''',
        '''                elif not name.startswith("__") and not isinstance(value, type):''',
        (f"{_PACKAGES}::test_a_class_within_the_class_of_a_processor_is_read",),
    ),
    Mutation(
        "plain values of layers", "behaviour/reader.py",
        "if isinstance(value, _SCALARS) or kind in ATOMS:", "if isinstance(value, _SCALARS):",
        _OF_LAYERS,
    ),
    Mutation(
        "long tuples of layers", "behaviour/reader.py",
        "if is_plain_tuple(value):", "if False:",
        _OF_LAYERS,
    ),
    Mutation(
        "modules that are replaced", "behaviour/code_values.py",
        "            if package(value.__name__) not in COMMON:\n", "            if False:\n",
        (f"{_PACKAGES}::test_a_module_of_settings_of_a_program_that_is_replaced_is_seen",),
    ),
    Mutation(
        "names that are composed at run time", "behaviour/reach.py",
        "if ends:", "if False:",
        ("behaviour/test_vouched.py::test_what_lies_deep_under_a_composed_name_is_seen_at_the_next_call",),
    ),
]
