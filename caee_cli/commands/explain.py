"""``caee explain``."""

from __future__ import annotations

from typing import Annotated

import typer

from caee_cli.options import JsonOption


def command(
    case: Annotated[
        str,
        typer.Argument(
            metavar="CASE", help="A JSON file with one case, a .jsonl file with a case a line, or - (lines)."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show one layer's decision, from a JSON case, with reasons.

    A case holds scores, placement, cost and a policy, and may hold top_k, topk_ids, selection_scores, token_mask,
    resident, rate and link_groups. Lines in give lines out; a line with an error gives {"error": …}.
    """
    from caee_cli.output import complain, emit_json, show
    from probes.errors import CaseError
    from reports.decision import decision_tables
    from runtime.policy.case import explain_case
    from runtime.policy.case_file import is_lines, lines_of, parse_case, read_case

    if not is_lines(case):
        content = read_case(case)
        try:
            outcome = explain_case(parse_case(content))
        except CaseError as error:
            raise CaseError(f"{case}: {error.message}", hint=error.hint) from error
        emit_json(outcome) if as_json else show(*decision_tables(outcome))
        return
    source = "standard input" if case == "-" else case
    total = failed = 0
    for total, (number, line) in enumerate(lines_of(case), start=1):  # noqa: B007  # read after the loop
        try:
            outcome = explain_case(parse_case(line))
        except CaseError as error:
            failed += 1
            if as_json:
                emit_json({"error": error.message, "line": number}, compact=True)
            else:
                complain(f"{source}, line {number}: {error.message}", error.hint)
            continue
        emit_json(outcome, compact=True) if as_json else show(*decision_tables(outcome))
    if failed:
        raise CaseError(
            f"{source}: {failed} of {total} cases could not be decided", hint="correct the lines that report an error"
        )
