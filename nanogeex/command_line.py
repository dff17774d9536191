"""One strict command line, made from the fields of a configuration.

Defaults < preset < flags.  An unknown flag, a value out of its bounds or of the wrong type is a
`UsageError` of one line, instead of argparse's page of usage.

Tests: tests/test_config.py, tests/test_errors.py.
"""

import argparse
import difflib
import math
from collections.abc import Callable
from dataclasses import fields

from nanogeex.config import PRESETS, UsageError, number_or_auto

SHOWN = {"None": "none", "False": "off", "True": "on"}      # defaults, in --help


def parse(config_class, argv: list[str], description: str,
          derived: Callable[[dict], dict] = lambda given: {}):
    """Command line -> config.  Raises UsageError; `--help` prints and leaves with 0.  `derived`
    makes further defaults of the flags that are given."""
    positionals = "".join(f"{f.metadata['positional']} " for f in fields(config_class)
                          if "positional" in f.metadata)
    parser = argparse.ArgumentParser(
        usage="%(prog)s " + positionals + "[flags]", description=description, allow_abbrev=False,
        argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = _refuse                      # one line, not a page of usage
    known = {f.name: f for f in fields(config_class)}
    preset_defaults, groups = PRESETS["tiny"] if "preset" in known else {}, {}
    for f in known.values():
        meta = f.metadata
        if meta["group"] not in groups:
            groups[meta["group"]] = parser.add_argument_group(meta["group"])
        group = groups[meta["group"]]
        if "positional" in meta:                # "SRC": one; "RUN...": or more; "[DST]": or none
            group.add_argument(f.name, metavar=meta["positional"].strip("[]"), help=meta["help"],
                               nargs={".": "+", "]": "?"}.get(meta["positional"][-1]))
            continue
        names = [_flag_name(f)] + ([meta["short"]] if "short" in meta else [])
        default = preset_defaults.get(f.name, f.default)
        shown = meta["help"] + f" (default: {SHOWN.get(str(default), default)})"
        if default is None and "default: " in meta["help"]:     # what it depends on
            shown = meta["help"]
        if f.type is bool:
            switch = argparse.BooleanOptionalAction if f.default else "store_true"
            group.add_argument(*names, action=switch, help=shown)
            continue
        convert = meta.get("type", f.type)
        metavar = (meta.get("metavar") or " | ".join(meta.get("choices", []))
                   or {int: "N", float: "X"}.get(convert, "TEXT"))
        options = {"type": convert, "metavar": metavar}
        if "list" in str(f.type):
            options |= {"type": str, "action": "extend", "nargs": "+"}
        group.add_argument(*names, help=shown, **options)
        for short in ("fp16", "bf16") if f.name == "precision" else ():
            group.add_argument(f"--{short}", dest="precision", action="store_const", const=short,
                               help=f"the same as --precision {short}")
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], parser._option_string_actions, 1)
        raise UsageError(f"{unknown[0]}: no such flag or argument"
                         f"{'; did you mean ' + near[0] + '?' if near else ''}; see --help")
    for name, value in vars(given).items():
        _check_bounds(known[name], value)
    preset = PRESETS[getattr(given, "preset", "tiny")] if "preset" in known else {}
    return config_class(**preset | derived(vars(given)) | vars(given))


def _flag_name(f) -> str:
    return "--" + f.name.replace("_", "-")


def _refuse(message: str):
    raise UsageError(message.removeprefix("argument ") + "; see --help for the flags")


def _check_bounds(f, value):
    meta, shown = f.metadata, f"{_flag_name(f)} {value}"
    if value == "auto" and meta.get("type") is number_or_auto:
        return
    if "choices" in meta and value not in meta["choices"]:
        raise UsageError(f"{shown}: unknown; choose one of {', '.join(meta['choices'])}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{shown}: not a finite number; give one")
    if "low" in meta and value < meta["low"]:
        raise UsageError(f"{shown}: must be {meta['low']} or more")
    if "above" in meta and value <= meta["above"]:
        raise UsageError(f"{shown}: must be above {meta['above']}")
    if "high" in meta and value > meta["high"]:
        raise UsageError(f"{shown}: must be {meta['high']} or less")
