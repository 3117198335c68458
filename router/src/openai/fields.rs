//! Typed access to the fields of a JSON object, with errors that name them.

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::ApiError;

/// A request body.
#[derive(Debug)]
pub(crate) struct Fields(Map<String, Value>);

/// JSON's word for what a value is.
pub(super) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// "Invalid value for 'x': expected y, got z"
pub(super) fn mismatch(field: &str, expected: impl Display, value: &Value) -> ApiError {
    // Numbers are shown, text is not: it may be the prompt.
    let got = match value {
        Value::Number(number) => number.to_string(),
        other => type_name(other).to_owned(),
    };
    ApiError::invalid(field, format!("Invalid value for '{field}': expected {expected}, got {got}"))
}

/// Parsed, an object takes a hundred times the memory of its text.
const CONTAINERS_MAX: usize = 100_000;

/// Objects and arrays that begin in `body`, those inside strings not counted.
pub(crate) fn containers(body: &[u8]) -> usize {
    let (mut count, mut in_string, mut escaped) = (0, false, false);
    for byte in body {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

impl Fields {
    /// Parses a body. The error says where, never what.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        if containers(body) > CONTAINERS_MAX {
            let message = format!("The body has more than {CONTAINERS_MAX} objects and arrays");
            return Err(ApiError::malformed(message));
        }
        let value: Value = serde_json::from_slice(body).map_err(|error| {
            let what = match error.classify() {
                serde_json::error::Category::Eof => "it ends too early",
                _ if std::str::from_utf8(body).is_err() => "it is not UTF-8",
                _ => "it does not parse",
            };
            let (line, column) = (error.line(), error.column());
            ApiError::malformed(format!("The body is not valid JSON: {what} at line {line} column {column}"))
        })?;
        match value {
            Value::Object(map) => Ok(Self(map)),
            other => {
                let got = type_name(&other);
                Err(ApiError::malformed(format!("The body must be a JSON object, got {got}")))
            }
        }
    }

    /// The value, unless absent or null.
    pub(crate) fn value(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    pub(crate) fn boolean(&self, field: &str, default: bool) -> Result<bool, ApiError> {
        match self.value(field) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(mismatch(field, "true or false", other)),
        }
    }

    pub(crate) fn string(&self, field: &str) -> Result<Option<&str>, ApiError> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(other) => Err(mismatch(field, "a string", other)),
        }
    }

    pub(crate) fn number(&self, field: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let expected = format!("a number from {} to {}", range.start(), range.end());
        match value.as_f64() {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(mismatch(field, expected, value)),
        }
    }

    pub(crate) fn integer(&self, field: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let expected = format!("an integer from {} to {}", range.start(), range.end());
        integer(value)
            .filter(|number| range.contains(number))
            .map(Some)
            .ok_or_else(|| mismatch(field, expected, value))
    }

    pub(crate) fn object(&self, field: &str) -> Result<Option<&Map<String, Value>>, ApiError> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(mismatch(field, "an object", other)),
        }
    }

    pub(crate) fn array(&self, field: &str) -> Result<Option<&Vec<Value>>, ApiError> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Array(values)) => Ok(Some(values)),
            Some(other) => Err(mismatch(field, "an array", other)),
        }
    }
}

/// The integer that `value` is; `3.0` is one, since JSON writers differ.
pub(super) fn integer(value: &Value) -> Option<i64> {
    /// Beyond it a float does not name one integer.
    const EXACT: f64 = (1u64 << 53) as f64;
    let whole = |number: f64| (number.fract() == 0.0 && number.abs() <= EXACT).then_some(number as i64);
    value.as_i64().or_else(|| value.as_f64().filter(|_| !value.is_u64()).and_then(whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Fields {
        Fields::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_body_that_is_no_json_object_is_refused_without_an_echo() {
        for body in
            [&b"{\"prompt\": \"secret"[..], b"secret", b"[\"secret\"]", b"{\"a\": \"secret\xFF\"}", b""]
        {
            let error = Fields::parse(body).unwrap_err();
            assert!(error.status == 400 && !error.message().contains("secret"), "{error:?}");
        }
    }

    #[test]
    fn containers_are_counted_outside_strings_only() {
        assert_eq!(containers(br#"{"a": [1, {"b": "[{\"[{"}]}"#), 3);
        assert_eq!(containers(b""), 0);
    }

    #[test]
    fn a_body_of_nothing_but_objects_is_refused_before_it_is_parsed() {
        let body = format!("{{\"x\": [{}{{}}]}}", "{},".repeat(CONTAINERS_MAX));
        let error = Fields::parse(body.as_bytes()).unwrap_err();
        assert_eq!(error.message(), "The body has more than 100000 objects and arrays");
        let tokens = format!("{{\"prompt\": [{}1]}}", "1,".repeat(500_000));
        assert!(Fields::parse(tokens.as_bytes()).is_ok());
    }

    #[test]
    fn nesting_without_end_is_an_error() {
        assert_eq!(Fields::parse(&b"[".repeat(10_000)).unwrap_err().status, 400);
    }

    #[test]
    fn null_is_absent() {
        let fields = fields(r#"{"a": null}"#);
        assert_eq!(fields.boolean("a", true), Ok(true));
        assert_eq!(fields.string("a"), Ok(None));
        assert_eq!(fields.number("a", 0.0..=1.0), Ok(None));
        assert_eq!(fields.integer("a", 0..=1), Ok(None));
    }

    #[test]
    fn errors_name_field_expectation_and_type() {
        let error = fields(r#"{"temperature": "hot"}"#).number("temperature", 0.0..=2.0).unwrap_err();
        let expected = "Invalid value for 'temperature': expected a number from 0 to 2, got string";
        assert_eq!(error.message(), expected);
    }

    #[test]
    fn integers_may_be_written_as_floats_but_not_have_fractions() {
        let fields = fields(r#"{"a": 3.0, "b": 3.5, "c": true, "d": 18446744073709551615, "e": 1e300}"#);
        assert_eq!(fields.integer("a", 0..=10), Ok(Some(3)));
        for field in ["b", "c", "d", "e"] {
            assert!(fields.integer(field, 0..=i64::MAX).is_err(), "{field}");
        }
    }
}
