//! Reading configuration files: raw becomes checked once, at start.
//!
//! ```text
//!  TOML text ──read──▶ (raw struct, problems) ──check each field──▶ finish
//! ```
//!
//! Every mistake in a file is reported at once: unknown keys are collected
//! while parsing, ranges while checking. Not its job: knowing any role's fields.

use std::fmt::Display;
use std::path::Path;

use serde::de::DeserializeOwned;

/// A file that cannot be used, with everything that is wrong in it.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("{file}: {reason}")]
    Unreadable {
        /// The file.
        file: String,
        /// Why.
        reason: String,
    },
    /// The text is not TOML, or a value has the wrong type.
    #[error("{file}: {reason}")]
    Syntax {
        /// The file.
        file: String,
        /// Where and what, from the parser.
        reason: String,
    },
    /// Keys or values that are not allowed.
    #[error("{file}: {}", .problems.join("; "))]
    Problems {
        /// The file.
        file: String,
        /// One sentence each.
        problems: Vec<String>,
    },
}

/// Collects what is wrong in one file.
#[derive(Debug)]
pub struct Problems {
    file: String,
    problems: Vec<String>,
}

/// Parses the file into `T`; unknown keys become problems.
pub fn read_file<T: DeserializeOwned>(path: &Path) -> Result<(T, Problems), SettingsError> {
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|error| SettingsError::Unreadable { file: file.clone(), reason: error.to_string() })?;
    read_text(&text, &file)
}

/// Parses `text` into `T`; unknown keys become problems. `file` is for messages.
pub fn read_text<T: DeserializeOwned>(text: &str, file: &str) -> Result<(T, Problems), SettingsError> {
    let syntax = |error: toml::de::Error| SettingsError::Syntax {
        file: file.to_owned(),
        reason: error.to_string().trim_end().to_owned(),
    };
    let mut problems = Problems { file: file.to_owned(), problems: Vec::new() };
    let document = toml::Deserializer::parse(text).map_err(syntax)?;
    let raw = serde_ignored::deserialize(document, |key| {
        problems.problems.push(format!("unknown key `{key}`"));
    })
    .map_err(syntax)?;
    Ok((raw, problems))
}

impl Problems {
    /// Notes a problem unless `value` is within `low..=high`.
    pub fn range<V: PartialOrd + Display>(&mut self, key: &str, value: V, low: V, high: V) {
        if !(value >= low && value <= high) {
            self.problems.push(format!("`{key}` is {value}, allowed {low} to {high}"));
        }
    }

    /// Notes a problem with `key` unless `holds`.
    pub fn require(&mut self, holds: bool, key: &str, what: impl Display) {
        if !holds {
            self.problems.push(format!("`{key}` {what}"));
        }
    }

    /// `Ok` if nothing was noted.
    pub fn finish(self) -> Result<(), SettingsError> {
        if self.problems.is_empty() {
            return Ok(());
        }
        Err(SettingsError::Problems { file: self.file, problems: self.problems })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Deserialize)]
    struct Raw {
        slots: usize,
        step_ms: f64,
    }

    #[test]
    fn all_mistakes_are_reported_at_once() {
        let text = "slots = 0\nstep_ms = nan\nslotss = 3\n";
        let (raw, mut problems) = read_text::<Raw>(text, "d.toml").unwrap();
        problems.range("slots", raw.slots, 1, 64);
        problems.range("step_ms", raw.step_ms, 1.0, 1000.0);
        let message = problems.finish().unwrap_err().to_string();
        assert_eq!(
            message,
            "d.toml: unknown key `slotss`; `slots` is 0, allowed 1 to 64; `step_ms` is NaN, allowed 1 to 1000"
        );
    }

    #[test]
    fn wrong_type_names_line_and_key() {
        let error =
            read_text::<Raw>("slots = \"many\"\nstep_ms = 1.0\n", "d.toml").err().unwrap().to_string();
        assert!(error.contains("line 1") && error.contains("slots"), "{error}");
    }

    #[test]
    fn missing_file_is_named() {
        let error = read_file::<Raw>(Path::new("/nonexistent/d.toml")).err().unwrap().to_string();
        assert!(error.starts_with("/nonexistent/d.toml: "), "{error}");
    }
}
