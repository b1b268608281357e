"""Flags: one table row each, with its environment variable, its default, and one-line errors.

A flag on the command line wins over ``KAIROX_<NAME>``, which wins over the default.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

OWN_VARIABLES = (
    "KAIROX_CACHE",
    "KAIROX_REQUIRE_CHROMIUM",
    "KAIROX_REQUIRE_MODEL",
    "KAIROX_REQUIRE_NODE",
)  # read by the registry and by the tests


PATHS = ("FILE", "FOLDER", "DIR")  # what values are called that may not be empty


class UsageError(ValueError):
    """A command line that cannot be carried out as written."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One option.

    Attributes:
        dest: name of the value; its environment variable is ``KAIROX_`` and this in capitals.
        names: as written on the command line, short form first.
        help: one phrase for ``--help``.
        convert: turns the text into the value, or raises ValueError with the reason.
        default: the value where neither flag nor variable is given.
        metavar: what ``--help`` calls the value; None makes the flag a switch.
        off_names: names that turn a switch off.
        repeat: may be given several times; the value is a tuple.
    """

    dest: str
    names: tuple[str, ...]
    help: str
    convert: Callable[[str], Any] = str
    default: Any = None
    metavar: str | None = None
    off_names: tuple[str, ...] = ()
    repeat: bool = False

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"KAIROX_{self.dest.upper()}"


class Parser(argparse.ArgumentParser):
    """Raises UsageError with one line where argparse would print its usage and exit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(
            r"-\.?\d"
        )  # so that -5GB is a value: then it is told why not

    def error(self, message: str) -> NoReturn:
        """Raise ``message`` with the place to look it up."""
        if "expected one argument" in message:
            message += " (a text that begins with a dash goes after '=', as in --prompt=-x)"
        if found := re.match(r"argument COMMAND: invalid choice: '([^']*)' \(choose from (.*)\)", message):
            near = get_close_matches(found[1], re.findall(r"[\w-]+", found[2]), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            message = f"there is no command {found[1]!r}: {hint}choose from {found[2]}".replace("'", "")
        raise UsageError(f"{message}; see '{self.prog} --help'")


def add_flags(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[Flag]]) -> None:
    """Add flags to ``parser``, a titled group each, and the table itself for ``resolve``."""
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    if parser.epilog is None:
        parser.epilog = "A flag wins over its KAIROX_ variable, which wins over the default."
    parser.set_defaults(flags=tuple(flag for flags in groups.values() for flag in flags))


def resolve(args: argparse.Namespace, environ: Mapping[str, str]) -> argparse.Namespace:
    """Fill in environment variables and defaults, and convert all texts.

    Args:
        args: what the parser returned for a parser that ``add_flags`` filled.
        environ: where ``KAIROX_*`` are looked up; an empty variable counts as not set.

    Returns:
        A new namespace with every flag's value, ``given``: the names of those from the command line, and ``chosen``:
        of those from there or from a variable.

    Raises:
        UsageError: a text cannot be converted, the message names the flag or the variable; a positional argument is
            empty.
    """
    values = dict(vars(args))
    flagged = {flag.dest for flag in args.flags}
    for name in sorted(set(values) - flagged):
        if values[name] == "" or (isinstance(values[name], list) and "" in values[name]):
            raise UsageError(f"{name.upper()} is empty: name what it stands for")
    given = {flag.dest for flag in args.flags if values[flag.dest] is not None}
    chosen = given | {flag.dest for flag in args.flags if environ.get(flag.variable)}
    for flag in args.flags:
        text = values[flag.dest]
        if flag.dest in given:
            source = "/".join(flag.names)
        elif environ.get(flag.variable):
            source, text = flag.variable, environ[flag.variable]
            text = [text] if flag.repeat else text
        else:
            values[flag.dest] = flag.default
            continue
        values[flag.dest] = _convert(flag, source, text)
    return argparse.Namespace(**values, given=frozenset(given), chosen=frozenset(chosen))


def reject_unknown(extra: Sequence[str], flags: Sequence[Flag], prog: str) -> None:
    """Raise UsageError for words that no flag took, with the flag that was probably meant."""
    if not extra:
        return
    word = extra[0]
    known = [name for flag in flags for name in (*flag.names, *flag.off_names)] + ["--help"]
    near = get_close_matches(word.split("=")[0].replace("_", "-"), known, n=1)
    if not word.startswith("-"):
        hint = f"quote a text with spaces; see '{prog} --help'"
    else:
        hint = f"did you mean {near[0]}?" if near else f"see '{prog} --help'"
    raise UsageError(f"{prog} does not know {word!r}: {hint}")


def misspelled_variables(environ: Mapping[str, str], flags: Sequence[Flag]) -> list[str]:
    """Return a sentence for each ``KAIROX_*`` variable that nothing reads.

    One that is named after a flag, such as KAIROX_TEMP or KAIROX_NO_ANB, is told that flag's own variable.
    """
    known = {*OWN_VARIABLES, *(flag.variable for flag in flags)}
    long = [(name, flag) for flag in flags for name in flag.names if name.startswith("--")]
    as_flags = {_as_variable(name): flag.variable for name, flag in long}
    for flag in flags:
        for name in (*flag.off_names, f"--no-{flag.dest}") if flag.off_names else ():
            as_flags[_as_variable(name)] = f"{flag.variable}=0"
    found = []
    for name in sorted(set(environ) - known):
        if name.startswith("KAIROX_"):
            near = [as_flags[name]] if name in as_flags else get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {near[0]}?" if near else "'kairox COMMAND --help' shows each flag's variable"
            )
            found.append(f"nothing reads the variable {name}: {hint}")
    return found


def whole_number(text: str) -> int:
    """Convert to int."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def positive_number(text: str) -> int:
    """Convert to an int of at least 1."""
    if (value := whole_number(text)) < 1:
        raise ValueError(f"{text!r} must be 1 or more")
    return value


def number(text: str) -> float:
    """Convert to float."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    about = f"{flag.help} [{_default_text(flag)}{flag.variable}]".replace("%", "%%")
    shared: dict[str, Any] = {"dest": flag.dest, "default": None}
    if flag.metavar is not None:
        action = "append" if flag.repeat else "store"
        group.add_argument(*flag.names, action=action, metavar=flag.metavar, help=about, **shared)
        return
    group.add_argument(*flag.names, action="store_true", help=about, **shared)
    if flag.off_names:
        group.add_argument(*flag.off_names, action="store_false", help=f"turn {flag.names[-1]} off", **shared)


def _as_variable(name: str) -> str:
    """Return the variable that somebody would expect of a flag who only knows its name."""
    return "KAIROX_" + name.lstrip("-").replace("-", "_").upper()


def _default_text(flag: Flag) -> str:
    if flag.metavar is None:
        return "default on; " if flag.default else ""
    if flag.default is None or flag.default == ():
        return ""
    default = ",".join(map(str, flag.default)) if isinstance(flag.default, tuple) else flag.default
    return f"default {default}; "


def _convert(flag: Flag, source: str, text: Any) -> Any:
    if text == "" and flag.metavar in PATHS:
        raise UsageError(f"{source}: the value is empty: name a {flag.metavar.lower()}, or leave it out")
    try:
        if flag.metavar is None:
            return text if isinstance(text, bool) else _switch(text)
        return tuple(map(flag.convert, text)) if flag.repeat else flag.convert(text)
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from error


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither 1 nor 0")
