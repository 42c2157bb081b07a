"""HTTP API reference, generated from the OpenAPI document that the daemon serves."""

from typing import Any

from docs.site.markdown import code, page, table
from gpuenergyd.daemon.api.openapi import api_description


def http_api_page() -> str:
    """Return the page with all paths, then all messages with their fields."""
    document = api_description()
    parts = [
        document["info"]["description"]
        + " `curl --unix-socket /run/gpuenergyd/gpuenergyd.sock http://d/v1/openapi.json` prints the OpenAPI document"
        " that this page is generated from.",
        "## Resources",
        table(
            ("method", "path", "description", "request", "response"),
            (
                (method.upper(), code(path), operation.get("summary", ""), *_messages(operation))
                for path, methods in document["paths"].items()
                for method, operation in methods.items()
            ),
        ),
        "A response other than 200 contains `error`: one line that says what was wrong and what is valid.",
        "## Messages",
    ]
    for name, schema in document["components"]["schemas"].items():
        parts += [f"### {name}", schema.get("description", ""), _fields(schema)]
    return page("HTTP API", *parts)


def _messages(operation: dict[str, Any]) -> tuple[str, str]:
    asked = operation.get("requestBody", {}).get("content", {})
    given = operation.get("responses", {}).get("200", {}).get("content", {})
    return _content(asked), _content(given)


def _content(content: dict[str, Any]) -> str:
    texts = []
    for content_type, what in content.items():
        text = type_text(what.get("schema", {}))
        texts.append(text if content_type == "application/json" else content_type)
    return ", ".join(texts)


def _fields(schema: dict[str, Any]) -> str:
    properties = schema.get("properties", {})
    if not properties:
        return type_text(schema)
    required = set(schema.get("required", ()))
    return table(
        ("field", "type", "required", "description"),
        (
            (code(name), type_text(field), "yes" if name in required else "", field.get("description", ""))
            for name, field in properties.items()
        ),
    )


def type_text(schema: dict[str, Any]) -> str:  # noqa: PLR0911  one return per kind of schema
    """Return a short description of a JSON schema."""
    match schema:
        case {"$ref": reference}:
            name = str(reference).rpartition("/")[2]
            return f"[{name}](#{name.lower()})"
        case {"anyOf": choices} | {"oneOf": choices}:
            return " or ".join(type_text(choice) for choice in choices)
        case {"enum": values}:
            return ", ".join(code(str(value)) for value in values)
        case {"prefixItems": items}:
            return f"[{', '.join(type_text(item) for item in items)}]"
        case {"type": "array", "items": dict(items)}:
            return f"list of {type_text(items)}"
        case {"type": kind}:
            return _limits(str(kind), schema)
        case _:
            return "any"


def _limits(kind: str, schema: dict[str, Any]) -> str:
    words = {
        "minimum": "≥", "maximum": "≤", "exclusiveMinimum": ">", "exclusiveMaximum": "<", "maxLength": "length ≤",
    }  # fmt: skip
    limits = [f"{word} {schema[key]}" for key, word in words.items() if key in schema]
    return f"{kind} ({', '.join(limits)})" if limits else kind
