//! The model's own chat template, rendered as Hugging Face transformers does.

use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json};

use crate::{calendar, clock, python_json};

/// A parsed template with the control tokens it may print.
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

const NAME: &str = "chat";

impl ChatTemplate {
    /// Parses `source`. Errors with line and reason.
    pub(crate) fn new(source: &str, bos_token: String, eos_token: String) -> Result<Self, String> {
        let mut environment = Environment::new();
        // As transformers sets them (`_compile_jinja_template`).
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_template_owned(NAME, source.to_owned()).map_err(|error| text(&error))?;
        Ok(Self { environment, bos_token, eos_token })
    }

    /// The prompt for `messages`. `extra` are further variables for the template.
    /// Errors with the template's own words; they go back to the client and nowhere else.
    pub(crate) fn render(&self, messages: &[Json], extra: &Map<String, Json>) -> Result<String, String> {
        let mut context = extra.clone();
        context.insert("messages".into(), messages.into());
        context.insert("add_generation_prompt".into(), true.into());
        context.insert("bos_token".into(), self.bos_token.clone().into());
        context.insert("eos_token".into(), self.eos_token.clone().into());
        let template = self.environment.get_template(NAME).map_err(|error| text(&error))?;
        template.render(context).map_err(|error| text(&error))
    }
}

fn text(error: &Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{detail} (template line {line})"),
        None => detail,
    }
}

fn tojson(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Python's other options change nothing here, or nothing that templates use.
    for ignored in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = options.get(ignored)?;
    }
    options.assert_all_used()?;
    let json = python_json::dumps(&value, indent.unwrap_or(0))
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(Value::from_safe_string(json))
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: &str) -> String {
    calendar::strftime(format, clock::unix_seconds())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(source: &str, messages: Json) -> Result<String, String> {
        let template = ChatTemplate::new(source, "<s>".into(), "</s>".into())?;
        template.render(messages.as_array().unwrap(), &Map::new())
    }

    #[test]
    fn chatml_renders_as_published() {
        let source = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
            {{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}\
            {{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}\
            {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
        let prompt = render(source, json!([{"role": "user", "content": "hi <b>"}])).unwrap();
        let expected = "<|im_start|>system\nYou are helpful<|im_end|>\n<|im_start|>user\nhi <b><|im_end|>\n\
            <|im_start|>assistant\n";
        assert_eq!(prompt, expected);
    }

    /// The published template of Gemma 3, shortened by its image branches.
    const GEMMA: &str = r#"{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
"#;

    #[test]
    fn gemmas_template_renders_and_refuses_as_published() {
        let messages = json!([
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": " hi "},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "bye"},
        ]);
        let expected = "<s><start_of_turn>user\nBe kind.\n\nhi<end_of_turn>\n<start_of_turn>model\nyes\
            <end_of_turn>\n<start_of_turn>user\nbye<end_of_turn>\n<start_of_turn>model\n";
        assert_eq!(render(GEMMA, messages).unwrap(), expected);
        let twice = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]);
        assert!(render(GEMMA, twice).unwrap_err().starts_with("Conversation roles must alternate"));
    }

    #[test]
    fn blocks_are_trimmed_and_python_methods_work() {
        let source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.content.strip() | upper }}{{ eos_token }}\n  \
            {% endfor %}\n{{ messages[0].get('name', 'none') }}";
        assert_eq!(render(source, json!([{"content": " a "}])).unwrap(), "<s>\nA</s>\nnone");
    }

    #[test]
    fn tojson_is_pythons() {
        let source = "{{ messages[0] | tojson }}|{{ messages[0] | tojson(indent=1) }}";
        let prompt = render(source, json!([{"a": "<", "b": [1]}])).unwrap();
        assert_eq!(prompt, "{\"a\": \"<\", \"b\": [1]}|{\n \"a\": \"<\",\n \"b\": [\n  1\n ]\n}");
    }

    #[test]
    fn a_raised_exception_is_the_error() {
        let source = "{{ raise_exception('roles must alternate') }}";
        let error = render(source, json!([])).unwrap_err();
        assert!(error.starts_with("roles must alternate"), "{error}");
    }

    #[test]
    fn the_date_is_printed() {
        let text = render("{{ strftime_now('%Y-%m-%d') }}", json!([])).unwrap();
        assert_eq!(text.len(), 10, "{text}");
    }

    #[test]
    fn a_template_that_does_not_parse_names_the_line() {
        let error = ChatTemplate::new("\n{% if %}", String::new(), String::new()).err().unwrap();
        assert!(error.contains("line 2"), "{error}");
    }
}
