"""What is wrong with the settings of a run, before anything runs.

    check_config  the public function: problems, mended lines and what was not checked, as a report
    document      a file, a mapping or an object as settings with their lines (the probe), and these as plain values;
                  the change that mends what can't be read, several faults at once
    parsers       JSON, YAML and TOML with the place of every value, and of what keeps a file from being read
    schema_from   what a setting may be: of a JSON Schema, a dataclass, a pydantic model, or a good config; and what the
                  field knows of learning rates, dropout, heads …, where there is no schema
    tables        names, ranges, choices, characters and slips that the others look up
    rules         the rules that name causes

Files are read as untrusted: nothing in them is evaluated, no YAML tag is built, and a file above 10 MB is refused.
"""

from __future__ import annotations
