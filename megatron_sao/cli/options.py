"""The command line that all commands share: `[CONFIG] [--section.key value ...] [--switch ...]`.

Reading it touches no file and imports nothing heavy; `run_command` is the one place where an error becomes an exit
code.
"""

import difflib
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from megatron_sao.cli.failure import Failure, record_failure
from megatron_sao.config import Config, help_on_keys, load_config
from megatron_sao.errors import ConfigError, SaoError

DRY_RUN = {"dry-run": "print the resolved configuration with derived numbers, and exit"}


@dataclass(frozen=True)
class Options:
    """What was asked for on a command line."""

    config_path: str | None  # None = the built-in defaults
    overrides: tuple[str, ...]  # each "section.key=value"
    switches: frozenset[str]  # those given, without dashes
    values: Mapping[str, str]  # the command's own options that take a value

    def load_config(self) -> Config:
        """The configuration these options describe. Raises: ConfigError."""
        return load_config(self.config_path, self.overrides)


def parse_options(
    argv: Sequence[str],
    *,
    about: str,
    switches: Mapping[str, str] = DRY_RUN,
    values: Mapping[str, str] | None = None,
) -> Options:
    """Sorts arguments into a config path, overrides, switches and values.

    Args:
        argv: without the program's name.
        about: one sentence for --help.
        switches: the command's options without a value, name -> help.
        values: the command's options with a value, name -> help; `--name value` or `--name=value`.
    Raises:
        ConfigError: with every fault of the command line. SystemExit(0) after --help.
    """
    values = values or {}
    faults: list[str] = []
    paths: list[str] = []
    overrides: list[str] = []
    given: dict[str, str] = {}
    rest = list(argv)
    if "--help" in rest or "-h" in rest:
        print(_help(about, {**switches, **values}))
        raise SystemExit(0)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("-"):
            paths.append(word)
        elif not word.startswith("--"):
            faults.append(f"{word}: options begin with two dashes")
        elif name in switches:
            given[name] = ""
            if equals:
                faults.append(f"{word}: --{name} takes no value")
        elif name not in values and (typo := _typo_of_own_option(name, [*switches, *values])):
            faults.append(f"{word}: there is no such option; did you mean --{typo}?")
        else:
            if not equals:
                if not rest or rest[0].startswith("--"):
                    faults.append(f"{word} has no value; write {word} VALUE or {word}=VALUE")
                    continue
                value = rest.pop(0)
            if name not in values:
                overrides.append(f"{name}={value}")
            elif name in given:
                faults.append(f"--{name} is given twice")
            else:
                given[name] = value
    for path in paths[1:]:
        faults.append(f"{path!r}: only one configuration file can be given, and {paths[0]!r} is one already")
    if faults:
        raise ConfigError("\n  ".join(["the command line cannot be read (--help shows what is allowed):", *faults]))
    return Options(
        config_path=paths[0] if paths else None,
        overrides=tuple(overrides),
        switches=frozenset(name for name in given if name in switches),
        values={name: value for name, value in given.items() if name in values},
    )


def run_command(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Runs a command and ends the process; a foreseen error prints its message alone and sets its exit code.

    Effect: exits; the program that started this one learns why (`cli/failure.py`). Anything that was not foreseen keeps
    its traceback.
    """
    try:
        code = main(sys.argv[1:]) or 0
    except SaoError as error:
        sys.stdout.flush()  # the message comes after everything printed before it
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
        record_failure(Failure(code, str(error)))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130  # what a shell reports for SIGINT
    except Exception as error:
        record_failure(Failure(1, f"{type(error).__name__}: {error}"))
        raise
    sys.exit(code)


def hush_libraries() -> None:
    """For commands that only plan or convert: nothing that Megatron and torch remark on concerns these.

    They tell of each package that a CPU does not have (transformer-engine, Apex) and of their own plans, 20 lines
    before the command's first. Effect: this process shows errors alone from now on.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _typo_of_own_option(name: str, own: list[str]) -> str | None:
    """The option that a name without a section was probably meant to be; configuration keys have a dot."""
    if "." in name:
        return None
    return next(iter(difflib.get_close_matches(name.replace("_", "-"), own, n=1)), None)


def _help(about: str, own: Mapping[str, str]) -> str:
    width = max(map(len, ["help", *own]))
    lines = [f"  --{name:<{width}}  {text}" for name, text in [*own.items(), ("help", "show this text, and exit")]]
    usage = "usage: COMMAND [CONFIG.toml] [--section.key value | --section.key=value ...] [options]"
    return "\n".join([about, "", usage, "", *lines, "", "Keys, their defaults and what they mean:", help_on_keys()])
