//! Chat messages, checked and brought into the form that templates expect.

use serde_json::{Map, Value};

use super::fields::{mismatch, type_name};
use super::{ApiError, Fields};

/// Messages for the chat template, and further variables for it.
#[derive(Debug)]
pub(crate) struct Messages {
    pub(crate) messages: Vec<Value>,
    pub(crate) template_variables: Map<String, Value>,
}

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

impl Messages {
    pub(crate) fn read(fields: &Fields) -> Result<Self, ApiError> {
        let Some(raw) = fields.array("messages")? else {
            return Err(ApiError::invalid("messages", "'messages' is missing"));
        };
        if raw.is_empty() {
            return Err(ApiError::invalid("messages", "'messages' is empty"));
        }
        let messages = raw.iter().enumerate().map(|(index, message)| checked(index, message));
        Ok(Self {
            messages: messages.collect::<Result<_, _>>()?,
            template_variables: fields.object("chat_template_kwargs")?.cloned().unwrap_or_default(),
        })
    }
}

fn checked(index: usize, message: &Value) -> Result<Value, ApiError> {
    let at = |field: &str| format!("messages[{index}].{field}");
    let Value::Object(message) = message else {
        return Err(mismatch(&format!("messages[{index}]"), "an object", message));
    };
    let role = role(&at("role"), message.get("role"))?;
    let mut checked = Map::new();
    checked.insert("role".into(), role.into());
    let content = match message.get("content") {
        None if role != "assistant" => {
            let field = at("content");
            return Err(ApiError::invalid(field.clone(), format!("'{field}' is missing")));
        }
        content => content_text(&at("content"), content.unwrap_or(&Value::Null))?,
    };
    checked.insert("content".into(), content.into());
    for field in ["name", "tool_call_id"] {
        match message.get(field) {
            None | Some(Value::Null) => {}
            Some(text @ Value::String(_)) => drop(checked.insert(field.into(), text.clone())),
            Some(other) => return Err(mismatch(&at(field), "a string", other)),
        }
    }
    if let Some(calls) = message.get("tool_calls").filter(|calls| !calls.is_null()) {
        checked.insert("tool_calls".into(), tool_calls(&at("tool_calls"), calls)?);
    }
    Ok(Value::Object(checked))
}

fn role(field: &str, value: Option<&Value>) -> Result<&'static str, ApiError> {
    let expected = format!("one of {ROLES:?}");
    let Some(value) = value else {
        return Err(ApiError::invalid(field, format!("'{field}' is missing, expected {expected}")));
    };
    let known = value.as_str().and_then(|role| ROLES.iter().find(|known| **known == role));
    match known {
        // The newer word for the same thing; templates know the older one.
        Some(&"developer") => Ok("system"),
        Some(role) => Ok(role),
        None => Err(mismatch(field, expected, value)),
    }
}

/// Templates expect one string; no content is an empty one.
fn content_text(field: &str, content: &Value) -> Result<String, ApiError> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => parts
            .iter()
            .enumerate()
            .map(|(index, part)| part_text(&format!("{field}[{index}]"), part))
            .collect(),
        other => Err(mismatch(field, "a string, null or an array of parts", other)),
    }
}

fn part_text<'a>(field: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    let Value::Object(part) = part else {
        return Err(mismatch(field, "an object with 'type' and 'text'", part));
    };
    match part.get("type") {
        Some(Value::String(kind)) if kind == "text" => {}
        Some(Value::String(kind)) => {
            let kind: String =
                kind.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '_').take(32).collect();
            let message = format!("'{field}' is of type '{kind}', this server supports only 'text'");
            return Err(ApiError::invalid(field, message));
        }
        other => return Err(mismatch(&format!("{field}.type"), "a string", other.unwrap_or(&Value::Null))),
    }
    match part.get("text") {
        Some(Value::String(text)) => Ok(text),
        other => Err(mismatch(&format!("{field}.text"), "a string", other.unwrap_or(&Value::Null))),
    }
}

/// Calls of earlier turns go to the template as they are: broken arguments that
/// a model once wrote must not make the rest of the conversation impossible.
fn tool_calls(field: &str, calls: &Value) -> Result<Value, ApiError> {
    let Value::Array(items) = calls else { return Err(mismatch(field, "an array", calls)) };
    match items.iter().position(|call| !call.is_object()) {
        Some(index) => {
            let got = type_name(&items[index]);
            let message = format!("Invalid value for '{field}[{index}]': expected an object, got {got}");
            Err(ApiError::invalid(field, message))
        }
        None => Ok(calls.clone()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(messages: Value) -> Result<Vec<Value>, String> {
        let body = json!({ "messages": messages }).to_string();
        let fields = Fields::parse(body.as_bytes()).unwrap();
        Messages::read(&fields).map(|read| read.messages).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn text_parts_are_joined_in_order_for_every_role() {
        for role in ["system", "user", "assistant", "tool"] {
            let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
            let messages = read(json!([{"role": role, "content": parts}])).unwrap();
            assert_eq!(messages, [json!({"role": role, "content": "ab"})]);
        }
    }

    #[test]
    fn a_developer_is_a_system_message() {
        let messages = read(json!([{"role": "developer", "content": "x"}])).unwrap();
        assert_eq!(messages[0]["role"], "system");
    }

    #[test]
    fn tool_history_passes_whatever_its_arguments() {
        for arguments in [json!("{"), json!(""), json!("null"), json!(null), json!(3)] {
            let call =
                json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}});
            let messages = read(json!([
                {"role": "assistant", "content": null, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "x"}
            ]));
            assert_eq!(messages.unwrap().len(), 2);
        }
    }

    #[test]
    fn refusals_name_the_place() {
        let cases = [
            (json!([]), "'messages' is empty"),
            (json!("x"), "Invalid value for 'messages': expected an array, got string"),
            (json!([3]), "Invalid value for 'messages[0]': expected an object, got 3"),
            (json!([{"content": "x"}]), "'messages[0].role' is missing"),
            (
                json!([{"role": "king", "content": "x"}]),
                "Invalid value for 'messages[0].role': expected one of",
            ),
            (json!([{"role": "user"}]), "'messages[0].content' is missing"),
            (json!([{"role": "user", "content": 1}]), "Invalid value for 'messages[0].content'"),
            (
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
                "'messages[0].content[0]' is of type 'image_url', this server supports only 'text'",
            ),
            (
                json!([{"role": "user", "content": [{"type": "text"}]}]),
                "Invalid value for 'messages[0].content[0].text': expected a string, got null",
            ),
            (json!([{"role": "user", "content": "x", "name": 1}]), "Invalid value for 'messages[0].name'"),
            (json!([{"role": "assistant", "tool_calls": 1}]), "Invalid value for 'messages[0].tool_calls'"),
        ];
        for (messages, expected) in cases {
            let error = read(messages).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
