//! Parameters that both generation endpoints share.

use kv_block::IsolationKey;
use kv_transfer::Sampling;
use serde_json::Value;

use super::fields::mismatch;
use super::{ApiError, Fields};

/// What a request asks for besides its prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Params {
    /// As the client wrote it.
    pub(crate) model: Option<String>,
    /// Seed 0 until one is chosen, see `seed`.
    pub(crate) sampling: Sampling,
    /// The client's own.
    pub(crate) seed: Option<u64>,
    /// Absent: up to the end of the context.
    pub(crate) max_tokens: Option<u32>,
    pub(crate) stops: Vec<String>,
    /// Answers per prompt.
    pub(crate) choices: u32,
    pub(crate) ignore_end: bool,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) isolation: IsolationKey,
}

/// Each answer takes a slot of its own.
const CHOICES_MAX: i64 = 16;
const STOPS_MAX: usize = 16;
/// Text is searched for each of them with every token.
const STOP_BYTES_MAX: usize = 16 << 10;
const SALT_BYTES_MAX: usize = 1024;

impl Params {
    pub(crate) fn read(fields: &Fields) -> Result<Self, ApiError> {
        refuse_unsupported(fields)?;
        let stream = fields.boolean("stream", false)?;
        Ok(Self {
            model: fields.string("model")?.map(str::to_owned),
            sampling: sampling(fields)?,
            seed: fields.integer("seed", i64::MIN..=i64::MAX)?.map(|seed| seed as u64),
            max_tokens: max_tokens(fields)?,
            stops: stops(fields)?,
            choices: fields.integer("n", 1..=CHOICES_MAX)?.unwrap_or(1) as u32,
            ignore_end: fields.boolean("ignore_eos", false)?,
            stream,
            include_usage: include_usage(fields, stream)?,
            isolation: isolation(fields)?,
        })
    }
}

/// Defaults are OpenAI's and vLLM's.
fn sampling(fields: &Fields) -> Result<Sampling, ApiError> {
    let number =
        |field, high, default| fields.number(field, 0.0..=high).map(|value| value.unwrap_or(default) as f32);
    let temperature = number("temperature", 2.0, 1.0)?;
    let top_p = number("top_p", 1.0, 1.0)?;
    let min_p = number("min_p", 1.0, 0.0)?;
    // vLLM writes "off" as -1, others as 0.
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?.unwrap_or(0).max(0) as u32;
    // A nucleus of nothing still keeps the best token, and no other: greedy.
    let temperature = if top_p > 0.0 { temperature } else { 0.0 };
    Ok(Sampling { temperature, top_p, top_k, min_p, seed: 0 })
}

fn max_tokens(fields: &Fields) -> Result<Option<u32>, ApiError> {
    let range = 1..=i64::from(i32::MAX);
    let old = fields.integer("max_tokens", range.clone())?;
    let new = fields.integer("max_completion_tokens", range)?;
    Ok(new.or(old).map(|tokens| tokens as u32))
}

fn stops(fields: &Fields) -> Result<Vec<String>, ApiError> {
    let expected = format!("a string or an array of at most {STOPS_MAX} strings");
    let Some(value) = fields.value("stop") else { return Ok(Vec::new()) };
    let items = match value {
        Value::String(_) => std::slice::from_ref(value),
        Value::Array(items) if items.len() <= STOPS_MAX => items.as_slice(),
        Value::Array(items) => {
            let message = format!("Invalid value for 'stop': expected {expected}, got {}", items.len());
            return Err(ApiError::invalid("stop", message));
        }
        other => return Err(mismatch("stop", expected, other)),
    };
    let mut stops = Vec::new();
    for item in items {
        let Value::String(stop) = item else { return Err(mismatch("stop", expected, item)) };
        if stop.len() > STOP_BYTES_MAX {
            let got = stop.len();
            let message = format!("A string in 'stop' has {got} bytes, allowed at most {STOP_BYTES_MAX}");
            return Err(ApiError::invalid("stop", message));
        }
        stops.extend((!stop.is_empty()).then(|| stop.clone()));
    }
    Ok(stops)
}

fn include_usage(fields: &Fields, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = fields.object("stream_options")? else { return Ok(false) };
    if !stream {
        let message = "'stream_options' is only allowed when 'stream' is true";
        return Err(ApiError::invalid("stream_options", message));
    }
    match options.get("include_usage") {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(other) => Err(mismatch("stream_options.include_usage", "true or false", other)),
    }
}

fn isolation(fields: &Fields) -> Result<IsolationKey, ApiError> {
    let Some(salt) = fields.string("cache_salt")? else { return Ok(IsolationKey::SHARED) };
    if salt.is_empty() || salt.len() > SALT_BYTES_MAX {
        let got = salt.len();
        let message = format!("'cache_salt' has {got} bytes, allowed 1 to {SALT_BYTES_MAX}");
        return Err(ApiError::invalid("cache_salt", message));
    }
    Ok(IsolationKey::from_salt(salt))
}

/// Fields that would change the answer, with the values that ask for nothing.
/// Ignoring the others would be an answer to another question.
const UNSUPPORTED: &[(&str, &[&str])] = &[
    ("logprobs", &["false"]),
    ("top_logprobs", &["0"]),
    ("prompt_logprobs", &[]),
    ("tools", &["[]"]),
    ("functions", &["[]"]),
    ("tool_choice", &["\"none\"", "\"auto\""]),
    ("function_call", &["\"none\"", "\"auto\""]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("modalities", &["[\"text\"]"]),
    ("audio", &[]),
    ("prediction", &[]),
    ("web_search_options", &[]),
    ("logit_bias", &["{}"]),
    ("frequency_penalty", &["0", "0.0"]),
    ("presence_penalty", &["0", "0.0"]),
    ("repetition_penalty", &["1", "1.0"]),
    ("repeat_penalty", &["1", "1.0"]),
    ("best_of", &["1"]),
    ("echo", &["false"]),
    ("suffix", &["\"\""]),
    ("use_beam_search", &["false"]),
    ("min_tokens", &["0"]),
    ("stop_token_ids", &["[]"]),
    ("bad_words", &["[]"]),
    ("include_stop_str_in_output", &["false"]),
    ("skip_special_tokens", &["true"]),
    ("add_generation_prompt", &["true"]),
    ("continue_final_message", &["false"]),
    ("chat_template", &[]),
    ("grammar", &["\"\""]),
    ("json_schema", &[]),
    ("structured_outputs", &[]),
    ("guided_json", &[]),
    ("guided_regex", &[]),
    ("guided_choice", &[]),
    ("guided_grammar", &[]),
];

fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    for (field, neutral) in UNSUPPORTED {
        if let Some(value) = fields.value(field)
            && !neutral.contains(&value.to_string().as_str())
        {
            return Err(ApiError::unsupported(field));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: Value) -> Result<Params, String> {
        let fields = Fields::parse(body.to_string().as_bytes()).unwrap();
        Params::read(&fields).map_err(|error| error.message().to_owned())
    }

    /// All optional fields that are read.
    const FIELDS: [&str; 14] = [
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "n",
        "ignore_eos",
        "stream",
        "stream_options",
        "cache_salt",
    ];

    #[test]
    fn absent_and_null_give_the_published_defaults() {
        let all_null: serde_json::Map<_, _> = FIELDS
            .iter()
            .chain(UNSUPPORTED.iter().map(|(name, _)| name))
            .map(|n| ((*n).into(), json!(null)))
            .collect();
        let params = read(Value::Object(all_null)).unwrap();
        assert_eq!(params, read(json!({})).unwrap());
        let sampling = Sampling { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 };
        assert_eq!(params.sampling, sampling);
        assert_eq!((params.seed, params.max_tokens, params.choices, params.stream), (None, None, 1, false));
        assert_eq!(params.isolation, IsolationKey::SHARED);
    }

    #[test]
    fn every_field_refuses_every_wrong_type_by_name() {
        let values = [
            json!("x"),
            json!(1),
            json!(-7),
            json!(1.5),
            json!(true),
            json!([]),
            json!([1]),
            json!({}),
            json!(1e300),
        ];
        let allowed = |field: &str, value: &Value| match field {
            "model" | "cache_salt" => value.is_string(),
            "temperature" => *value == json!(1) || *value == json!(1.5),
            "top_p" | "min_p" | "n" => *value == json!(1),
            "top_k" | "max_tokens" | "max_completion_tokens" => *value == json!(1),
            "seed" => *value == json!(1) || *value == json!(-7),
            "stop" => value.is_string() || *value == json!([]),
            "ignore_eos" | "stream" => value.is_boolean(),
            "tools" | "functions" | "stop_token_ids" | "bad_words" => *value == json!([]),
            "logit_bias" => *value == json!({}),
            "best_of" | "repetition_penalty" | "repeat_penalty" => *value == json!(1),
            "skip_special_tokens" | "add_generation_prompt" => *value == json!(true),
            _ => false,
        };
        for field in FIELDS.into_iter().chain(UNSUPPORTED.iter().map(|(name, _)| *name)) {
            for value in &values {
                match read(json!({ field: value })) {
                    Ok(_) => assert!(allowed(field, value), "{field} took {value}"),
                    Err(message) => {
                        assert!(!allowed(field, value), "{field} refused {value}: {message}");
                        assert!(message.contains(&format!("'{field}'")), "{message}");
                    }
                }
            }
        }
    }

    #[test]
    fn values_that_ask_for_nothing_pass() {
        for (field, neutral) in UNSUPPORTED {
            for text in *neutral {
                let value: Value = serde_json::from_str(text).unwrap();
                read(json!({ *field: value })).unwrap();
            }
        }
    }

    #[test]
    fn stop_takes_a_string_or_a_list_and_ignores_empty_ones() {
        assert_eq!(read(json!({"stop": "a"})).unwrap().stops, ["a"]);
        assert_eq!(read(json!({"stop": ["", "b"]})).unwrap().stops, ["b"]);
        assert!(read(json!({"stop": vec!["a"; 17]})).unwrap_err().contains("at most 16"));
        assert!(read(json!({"stop": "x".repeat(20_000)})).unwrap_err().contains("20000 bytes"));
    }

    #[test]
    fn limits_name_the_allowed_range() {
        assert!(read(json!({"max_tokens": 0})).unwrap_err().contains("from 1 to 2147483647, got 0"));
        assert!(read(json!({"temperature": 2.1})).unwrap_err().contains("from 0 to 2, got 2.1"));
        assert!(read(json!({"n": 17})).unwrap_err().contains("from 1 to 16, got 17"));
    }

    #[test]
    fn the_newer_token_limit_wins() {
        let params = read(json!({"max_tokens": 5, "max_completion_tokens": 7})).unwrap();
        assert_eq!(params.max_tokens, Some(7));
    }

    #[test]
    fn usage_in_the_stream_needs_a_stream() {
        let options = json!({"include_usage": true});
        assert!(read(json!({"stream": true, "stream_options": options})).unwrap().include_usage);
        assert!(read(json!({"stream_options": options})).unwrap_err().contains("'stream_options'"));
        let wrong = json!({"stream": true, "stream_options": {"include_usage": 1}});
        assert!(read(wrong).unwrap_err().contains("'stream_options.include_usage'"));
    }

    #[test]
    fn a_nucleus_of_nothing_is_greedy() {
        assert_eq!(read(json!({"top_p": 0})).unwrap().sampling.temperature, 0.0);
        assert_eq!(read(json!({"top_k": -1})).unwrap().sampling.top_k, 0);
    }
}
