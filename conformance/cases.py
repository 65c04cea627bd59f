"""All cases, in the order of docs/conformance.md."""

from typing import Final

from conformance import adapter_cases, chat_cases, form_cases, operation_cases, refused_cases, text_cases
from conformance.case import Case

SECTIONS: Final[dict[str, list[Case]]] = {
    "Chats": chat_cases.CASES,
    "Texts": text_cases.CASES,
    "Forms and tokens": form_cases.CASES,
    "Models and adapters": adapter_cases.CASES,
    "Operation": operation_cases.CASES,
    "Refused by both": refused_cases.BOTH,
    "Refused here on purpose": refused_cases.HERE,
}
"""title -> its cases"""
