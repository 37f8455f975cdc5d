"""Gives mkdocstrings what it cannot see by itself: dataclass fields as arguments of transforms, and
methods that a function has made, as those of lists."""

import importlib
import inspect
import re

import griffe

from torchzero_clip.core.formula import formula_paragraph

KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
    inspect.Parameter.VAR_POSITIONAL: griffe.ParameterKind.var_positional,
}


ARXIV = re.compile(r"\barXiv (\d{4}\.\d{4,5})")


def tidy(text):
    """Return a docstring with its formula as code, papers as links, and headings of griffe."""
    formula = formula_paragraph(text)
    if formula:
        text = text.replace(formula, f"`{' '.join(formula.split())}`", 1)
    text = ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return text.replace("\nExample:\n", "\nExamples:\n")


class Fields(griffe.Extension):
    def on_package(self, *, pkg, **_):
        self._visit(pkg)
        for name, member in list(pkg.members.items()):
            if member.is_alias and member.resolved and member.is_module and name in member.members:
                # griffe takes the file for what Python takes for the function in it
                pkg.set_member(name, griffe.Alias(name, member.final_target[name], parent=pkg))

    def _visit(self, module):
        for member in list(module.members.values()):
            if member.is_alias:
                continue
            if member.docstring is not None:
                member.docstring.value = tidy(member.docstring.value)
            if member.is_module:
                self._visit(member)
            elif member.is_class:
                self._visit(member)
                if module.is_module:
                    made = getattr(importlib.import_module(module.path), member.name)
                    self._add_init(member, made)
                    self._add_methods(member, made)

    def _add_methods(self, cls, made):
        for name, value in vars(made).items():
            known = cls.members.get(name)
            if inspect.isfunction(value) and (known is None or known.is_attribute):
                said = griffe.Docstring(value.__doc__) if value.__doc__ else None
                names = inspect.signature(value).parameters
                given = griffe.Parameters(*map(griffe.Parameter, names))
                returns = inspect.get_annotations(value).get("return")
                method = griffe.Function(name, parameters=given, returns=returns, docstring=said)
                cls.set_member(name, method)

    def _add_init(self, cls, made):
        if "__init__" in cls.members or not hasattr(made, "__dataclass_fields__"):
            return
        given = list(inspect.signature(made).parameters.values())
        parameters = [griffe.Parameter("self")]
        for p in given:
            default = None if p.default is inspect.Parameter.empty else repr(p.default)
            parameters.append(
                griffe.Parameter(
                    p.name,
                    annotation=self._annotation(cls, p),
                    kind=KINDS[p.kind],
                    default=default,
                )
            )
        init = griffe.Function("__init__", parameters=griffe.Parameters(*parameters))
        cls.set_member("__init__", init)

    def _annotation(self, cls, p):
        for owner in [cls, *cls.mro()]:
            if p.name in owner.members and owner.members[p.name].is_attribute:
                return owner.members[p.name].annotation
        return None if p.annotation is inspect.Parameter.empty else str(p.annotation)
