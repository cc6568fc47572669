"""`onnxpar completion`: a script with which a shell completes commands, options and their values.

The script has all names in it: nothing is started when a key is pressed, since to load the
transformer takes a second.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from onnxpar.cli.options import takes_options
from onnxpar.core.errors import OnnxparError

_WORD, _PLACEHOLDER = re.compile(r"[a-z0-9_]+"), re.compile(r"[A-Z]+")
# The help of an option that begins with its values: "constant, linear or cosine."
_LISTED = re.compile(r"((?:[a-z0-9_]+, )*[a-z0-9_]+,? or [a-z0-9_]+)[.:]")
# What may stand in place of a strategy file.
_BESIDE_FILES = {"PRESET": ("dp", "tp=", "replicate", "auto"), "AXES": ("dp=", "tp=")}


@dataclass(frozen=True)
class _Flag:
    """An option: its names, its help, and its values if they are known; None if it takes none.

    With `files`, the values are offered together with the names of files.
    """

    names: tuple[str, ...]
    help: str
    values: tuple[str, ...] | None
    files: bool = False


@dataclass(frozen=True)
class _Command:
    """A command: its help, its options, and the names of its own commands."""

    help: str
    flags: tuple[_Flag, ...]
    commands: tuple[str, ...] = ()


@takes_options
def command(
    context: typer.Context,
    shell: Annotated[
        str, typer.Argument(metavar="bash|zsh|fish", help="The shell that reads the script.")
    ],
) -> None:
    """Print a script that completes onnxpar's commands and options."""
    if shell not in _SCRIPTS:
        raise OnnxparError(f"completion: expected one of {', '.join(_SCRIPTS)}, got {shell!r}")
    root = context.find_root().command
    assert isinstance(root, TyperGroup)
    typer.echo(_SCRIPTS[shell](dict(_commands(root))), nl=False)


def _commands(root: TyperGroup) -> Iterator[tuple[str, _Command]]:
    for name, found in root.commands.items():
        # The options of `checkpoint merge` and its like are offered together.
        inner = list(found.commands.values()) if isinstance(found, TyperGroup) else [found]
        flags = {flag.names: flag for one in inner for flag in _flags(one)}
        own = tuple(found.commands) if isinstance(found, TyperGroup) else ()
        yield name, _Command(found.get_short_help_str(80), tuple(flags.values()), own)


def _flags(one: Any) -> Iterator[_Flag]:
    for param in one.params:
        if param.param_type_name != "option":
            continue
        parts = (param.metavar or "").split("|")
        known = tuple(part for part in parts if _WORD.fullmatch(part))
        if len(parts) == 1 or any(map(_PLACEHOLDER.fullmatch, parts)):
            known = ()  # also the name of a file, or a number
        beside = next((_BESIDE_FILES[part] for part in parts if part in _BESIDE_FILES), ())
        text = getattr(param, "help", None) or ""
        if found := _LISTED.match(text):
            known = tuple(dict.fromkeys(re.split(r",? or |, ", found[1])))
        text = text.split(". ")[0].rstrip(".")
        taken = None if param.is_flag else known or beside
        yield _Flag((*param.opts, *param.secondary_opts), text, taken, bool(beside))
    yield _Flag(("--help",), "Show this message and exit", None)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _words(one: _Command) -> str:
    return " ".join(name for flag in one.flags for name in flag.names)


def _cases(command: str, flag: _Flag) -> str:
    return "|".join(f'"{command} {name}"' for name in flag.names)


def _bash(commands: Mapping[str, _Command]) -> str:
    options = "\n".join(f"    {n}) options={_quoted(_words(c))} ;;" for n, c in commands.items())
    inner = "\n".join(
        f"    {n}) words={_quoted(' '.join(c.commands))} ;;"
        for n, c in commands.items()
        if c.commands
    )
    values = "\n".join(
        f"    {_cases(n, flag)}) values={_quoted(' '.join(flag.values))} files={flag.files:d} ;;"
        for n, c in commands.items()
        for flag in c.flags
        if flag.values
    )
    return f"""# bash completion of onnxpar: made by `onnxpar completion bash`
_onnxpar() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
  local command= options= words= values= files= word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    if [[ $word == -- ]]; then command=; continue; fi
    [[ -z $command && $word != -* ]] && command=$word
  done
  if [[ -z $command ]]; then
    COMPREPLY=($(compgen -W {_quoted(" ".join(commands) + " --version --help")} -- "$current"))
    return
  fi
  case $command in
{options}
  esac
  case $command in
{inner}
  esac
  case "$command $previous" in
{values}
  esac
  if [[ -n $values ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$current"))
    [[ $files == 1 ]] && COMPREPLY+=($(compgen -f -- "$current"))
    [[ ${{COMPREPLY[*]}} == *= ]] && compopt -o nospace 2> /dev/null
  elif [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  elif [[ -n $words && $previous == "$command" ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  else
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}}
complete -o filenames -F _onnxpar onnxpar
"""


def _zsh(commands: Mapping[str, _Command]) -> str:
    names = "\n".join(f"    {_described(n, c.help)}" for n, c in commands.items())
    cases = "\n".join(_zsh_case(n, c) for n, c in commands.items())
    return f"""#compdef onnxpar
# zsh completion of onnxpar: made by `onnxpar completion zsh`
_onnxpar() {{
  local command= word
  local -a found
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    if [[ $word == -- ]]; then command=; continue; fi
    [[ -z $command && $word != -* ]] && command=$word
  done
  local previous=$words[CURRENT-1]
  if [[ -z $command ]]; then
    found=(
{names}
    )
    _describe command found
    return
  fi
  case $command in
{cases}
  esac
  if [[ $words[CURRENT] == -* ]]; then _describe option found; else _files; fi
}}
compdef _onnxpar onnxpar
"""


def _described(name: str, text: str) -> str:
    return _quoted(name.replace(":", "\\:") + ":" + text)


def _zsh_case(name: str, one: _Command) -> str:
    lines = [f"    {name})"]
    if one.commands:
        inner = " ".join(one.commands)
        lines.append(f"      if [[ $previous == {name} ]]; then compadd {inner}; return; fi")
    for flag in one.flags:
        if flag.values:
            names, values = "|".join(flag.names), " ".join(flag.values)
            add = f"compadd {values}{'; _files' if flag.files else ''}"
            lines.append(f"      if [[ $previous == ({names}) ]]; then {add}; return; fi")
    lines.append("      found=(")
    lines += [f"        {_described(n, flag.help)}" for flag in one.flags for n in flag.names]
    return "\n".join([*lines, "      ) ;;"])


def _fish(commands: Mapping[str, _Command]) -> str:
    lines = ["# fish completion of onnxpar: made by `onnxpar completion fish`"]
    for name, one in commands.items():
        lines.append(
            f"complete -c onnxpar -n __fish_use_subcommand -fa {name} -d {_quoted(one.help)}"
        )
        here = _quoted(f"__fish_seen_subcommand_from {name}")
        if one.commands:
            lines.append(f"complete -c onnxpar -n {here} -fa {_quoted(' '.join(one.commands))}")
        for flag in one.flags:
            forms = [f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in flag.names]
            taken = "" if flag.values is None else " -r"
            taken = (
                f" -{'r' if flag.files else 'x'}a {_quoted(' '.join(flag.values))}"
                if flag.values
                else taken
            )
            text = f" -d {_quoted(flag.help)}" if flag.help else ""
            lines.append(f"complete -c onnxpar -n {here} {' '.join(forms)}{taken}{text}")
    return "\n".join(lines) + "\n"


_SCRIPTS: Mapping[str, Callable[[Mapping[str, _Command]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
