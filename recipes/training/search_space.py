"""What a search varies: a flag of pretrain.py or a key of the ds_config, and the values that it may take."""

from dataclasses import dataclass, fields
from typing import Any

from recipes.config.errors import UserError
from recipes.config.run_config import PretrainConfig

FORMS = "log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or choice:A,B,..."
LEARNING_RATE = "optimizer.params.lr"


@dataclass(frozen=True)
class Searched:
    """One dimension.

    key: a flag's name, or a dotted key of the ds_config. form: "log", "uniform", "int" or "choice".
    low, high: of numbers, both included. choices: as the user wrote them.
    """

    key: str
    form: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()

    @property
    def is_flag(self) -> bool:
        """A flag of pretrain.py, rather than a key for --set."""
        return self.key in {field.name for field in fields(PretrainConfig)}

    def suggest(self, trial: Any) -> Any:
        """A value for an Optuna trial, or for anything with its suggest_* methods."""
        if self.form == "choice":
            return trial.suggest_categorical(self.key, list(self.choices))
        if self.form == "int":
            return trial.suggest_int(self.key, int(self.low), int(self.high))
        return trial.suggest_float(self.key, self.low, self.high, log=self.form == "log")

    @property
    def first(self) -> Any:
        """A value to check the whole command line with."""
        return self.choices[0] if self.form == "choice" else int(self.low) if self.form == "int" else self.low


def parse_search(texts: list[str]) -> list[Searched]:
    """`KEY=FORM:...` each.

    Raises:
        UserError: with a line for each that cannot be read.
    """
    searched, faults = [], []
    for text in texts:
        key, equals, rule = text.partition("=")
        form, _, rest = rule.partition(":")
        example = f"write KEY={FORMS}"
        if not equals or not key or form not in ("log", "uniform", "int", "choice"):
            faults.append(f"--search {text}: {example}")
            continue
        if form == "choice":
            choices = tuple(choice for choice in rest.split(",") if choice)
            if len(choices) < 2:
                faults.append(f"--search {text}: needs two choices at least; {example}")
            searched.append(Searched(key, form, choices=choices))
            continue
        try:
            low, high = (float(bound) for bound in rest.split(":"))
        except ValueError:
            faults.append(f"--search {text}: needs two numbers; {example}")
            continue
        if not low < high or (form == "log" and low <= 0) or (form == "int" and (low % 1 or high % 1)):
            faults.append(f"--search {text}: LOW must be below HIGH, above 0 for log, both whole for int")
        searched.append(Searched(key, form, low, high))
    keys = [one.key for one in searched]
    faults += [f"--search {key}: stands there twice" for key in sorted({key for key in keys if keys.count(key) > 1})]
    if faults:
        raise UserError(*faults)
    return searched


def as_flags(searched: list[Searched], values: dict[str, Any]) -> list[str]:
    """The command-line words that set these values."""
    words: list[str] = []
    for one in searched:
        if one.key in values:
            value = values[one.key]
            text = repr(value) if isinstance(value, float) else str(value)
            words += [f"--{one.key}", text] if one.is_flag else ["--set", f"{one.key}={text}"]
    return words
