//! `json.dumps` as Python does it: what the `tojson` of published chat
//! templates gives (transformers sets `ensure_ascii=False` and no HTML escapes,
//! unlike Jinja's own filter). The separators matter: a model was trained on them.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// `indent` 0 is one line.
pub(crate) fn dumps(value: &impl Serialize, indent: usize) -> Result<String, serde_json::Error> {
    let mut bytes = Vec::new();
    if indent == 0 {
        value.serialize(&mut Serializer::with_formatter(&mut bytes, OneLine))?;
    } else {
        let spaces = vec![b' '; indent];
        let formatter = PrettyFormatter::with_indent(&spaces);
        value.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))?;
    }
    // serde_json writes UTF-8 only, so nothing is replaced.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// `", "` and `": "` between things, no line breaks.
struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn one_line_has_pythons_separators_and_no_html_escapes() {
        let value = json!({"a": [1, "<é>"], "b": {}});
        assert_eq!(dumps(&value, 0).unwrap(), r#"{"a": [1, "<é>"], "b": {}}"#);
    }

    #[test]
    fn indented_has_pythons_line_breaks() {
        assert_eq!(dumps(&json!({"a": [1]}), 2).unwrap(), "{\n  \"a\": [\n    1\n  ]\n}");
    }
}
