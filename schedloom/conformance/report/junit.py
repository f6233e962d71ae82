"""The report as JUnit XML: a test case for each invariant of each cell, and for each known-bad subject."""

from __future__ import annotations

from xml.etree import ElementTree

from schedloom.conformance.report.document import reproduce
from schedloom.conformance.results import CellResult, RunResult
from schedloom.conformance.verdicts import Verdict


def render(result: RunResult) -> str:
    suites = ElementTree.Element("testsuites", name="schedloom conformance", time=f"{result.seconds:.1f}")
    for cell in result.cells:
        suites.append(_suite(cell, result.first_seed))
    suites.append(_unavailable(result))
    suites.append(_mutants(result))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)


def _suite(cell: CellResult, first_seed: int) -> ElementTree.Element:
    name = f"{cell.tier} {cell.cell.label()}"
    suite = ElementTree.Element("testsuite", name=name, time=f"{cell.seconds:.1f}")
    for invariant, verdict in cell.invariants.items():
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=invariant)
        messages = [found.message for found in cell.violations if found.invariant == invariant]
        if verdict is Verdict.FAILED:
            ElementTree.SubElement(case, "failure", message="; ".join(messages)).text = reproduce(cell, first_seed)
        elif verdict is Verdict.INCONCLUSIVE:
            ElementTree.SubElement(case, "error", message="; ".join(["inconclusive", *cell.reasons]))
    if cell.verdict is Verdict.REFUSED:
        case = ElementTree.SubElement(suite, "testcase", classname=name, name="composition")
        ElementTree.SubElement(case, "skipped", message="; ".join(cell.missing))
    _count(suite)
    return suite


def _unavailable(result: RunResult) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name="tiers")
    for tier, reason in result.unavailable.items():
        case = ElementTree.SubElement(suite, "testcase", classname="tiers", name=tier)
        ElementTree.SubElement(case, "error", message=f"not run: {reason}")
    _count(suite)
    return suite


def _mutants(result: RunResult) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name="known-bad subjects")
    for mutant in result.mutants:
        case = ElementTree.SubElement(suite, "testcase", classname="known-bad subjects", name=mutant.name)
        if not mutant.killed:
            ElementTree.SubElement(case, "failure", message=f"it was not accused of breaking {mutant.dies_on}")
    _count(suite)
    return suite


def _count(suite: ElementTree.Element) -> None:
    suite.set("tests", str(len(suite)))
    for kind in ("failure", "error", "skipped"):
        plural = {"failure": "failures", "error": "errors", "skipped": "skipped"}[kind]
        suite.set(plural, str(len(suite.findall(f"testcase/{kind}"))))
