"""`onnxpar completion`: a script with which a shell completes commands, options and their values.

The script has all names in it: nothing is started when a key is pressed, since to load the
transformer takes a second.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from onnxpar.cli.options import described, takes_options
from onnxpar.core.errors import OnnxparError


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
    """A command: its help, its options, and the words that may follow it, if these are known."""

    help: str
    flags: tuple[_Flag, ...]
    words: tuple[str, ...] = ()


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
        own = tuple(found.commands) if isinstance(found, TyperGroup) else _following(found)
        yield name, _Command(found.get_short_help_str(80), tuple(flags.values()), own)


def _following(one: Any) -> tuple[str, ...]:
    """Returns the values of the first argument if the help names them all, as in `bash|zsh`."""
    first = next((p for p in one.params if p.param_type_name == "argument"), None)
    words = tuple(((first and first.metavar) or "").split("|"))
    return words if all(word.islower() for word in words) else ()


def _flags(one: Any) -> Iterator[_Flag]:
    options = described(one.callback)
    for param in one.params:
        if param.param_type_name != "option":
            continue
        option = options.get(param.name)
        values = () if option is None else option.values
        files = "FILE" in (param.metavar or "").split("|")
        text = (getattr(param, "help", None) or "").split(". ")[0].rstrip(".")
        names = (*param.opts, *param.secondary_opts)
        yield _Flag(names, text, None if param.is_flag else values, bool(values) and files)
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
        f"    {n}) words={_quoted(' '.join(c.words))} ;;" for n, c in commands.items() if c.words
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
  # Readline makes three words of --option=value.
  [[ $current == = ]] && current=
  [[ $previous == = ]] && previous=${{COMP_WORDS[COMP_CWORD-2]}}
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
    [[ ${{COMPREPLY[*]}} == *[=:] ]] && compopt -o nospace 2> /dev/null
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
  if [[ $words[CURRENT] == --*=* ]]; then
    previous=${{words[CURRENT]%%=*}}
    compset -P '*='
  fi
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
    if one.words:
        inner = " ".join(one.words)
        lines.append(f"      if [[ $previous == {name} ]]; then compadd {inner}; return; fi")
    for flag in one.flags:
        if flag.values:
            names = "|".join(flag.names)
            begun = [value for value in flag.values if value.endswith(("=", ":"))]
            whole = [value for value in flag.values if value not in begun]
            add = f"compadd -- {' '.join(whole)}" if whole else ":"
            if begun:
                add += f"; compadd -S '' -- {' '.join(begun)}"
            if flag.files:
                add += "; _files"
            lines.append(f"      if [[ $previous == ({names}) ]]; then {add}; return; fi")
    lines.append("      found=(")
    lines += [f"        {_described(n, flag.help)}" for flag in one.flags for n in flag.names]
    return "\n".join([*lines, "      ) ;;"])


def _fish(commands: Mapping[str, _Command]) -> str:
    options = "\n".join(f"    case {n}; string split -- ' ' {_quoted(_words(c))}"
                        for n, c in commands.items())  # fmt: skip
    values = "\n".join(
        f"    case {_quoted(f'{n} {name}')}; string split -- ' ' {_quoted(' '.join(flag.values))}"
        for n, c in commands.items()
        for flag in c.flags
        if flag.values
        for name in flag.names
    )
    lines = [_FISH_HEAD.format(options=options, values=values)]
    for name, one in commands.items():
        text = _quoted(one.help)
        lines.append(f"complete -c onnxpar -n '__onnxpar_is none' -fa {name} -d {text}")
        here = _quoted(f"__onnxpar_is {name}")
        if one.words:
            lines.append(f"complete -c onnxpar -n {here} -fa {_quoted(' '.join(one.words))}")
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


_FISH_HEAD = """# fish completion of onnxpar: made by `onnxpar completion fish`
# The command to which the next word belongs: behind --, that of the ranks.
function __onnxpar_command
  set -l command none
  for word in (commandline -opc)[2..-1]
    if test "$word" = --
      set command none
    else if test $command = none; and not string match -q -- '-*' $word
      set command $word
    end
  end
  echo $command
end
function __onnxpar_is
  test "$argv[1]" = (__onnxpar_command)
end
# Behind --, fish completes no options by itself.
function __onnxpar_behind
  contains -- -- (commandline -opc)
end
function __onnxpar_options
  string match -q -- '-*' (commandline -ct); or return
  switch (__onnxpar_command)
{options}
  end
end
function __onnxpar_values
  set -l words (commandline -opc)
  switch (__onnxpar_command)" $words[-1]"
{values}
  end
end
complete -c onnxpar -n __onnxpar_behind -a '(__onnxpar_options) (__onnxpar_values)'"""

_SCRIPTS: Mapping[str, Callable[[Mapping[str, _Command]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
