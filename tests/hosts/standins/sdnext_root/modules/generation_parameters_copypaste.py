"""Which settings the names in an infotext stand for."""

infotext_to_setting_name_mapping: list[tuple[str, str]] = [("Parser", "prompt_attention")]
