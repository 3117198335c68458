//! The policy file: read whole, and read again when it changes.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Deserialize;
use settings::{Problems, SettingsError};

use super::{Fallback, Mode, Policy};

/// A policy file on disk and the version of it that was read last.
#[derive(Debug)]
pub struct PolicyFile {
    path: PathBuf,
    seen: Option<Version>,
}

/// Enough to see a change: editors that keep the time change the length, and
/// the other way round.
type Version = (SystemTime, u64);

impl PolicyFile {
    /// Reads the file for the first time.
    pub fn open(path: &Path) -> Result<(Self, Policy), SettingsError> {
        let file = Self { path: path.to_owned(), seen: version(path) };
        let policy = read(path)?;
        Ok((file, policy))
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The new policy if the file changed since the last call; an error once per
    /// change that cannot be used.
    pub fn changed(&mut self) -> Option<Result<Policy, SettingsError>> {
        let version = version(&self.path);
        if version == self.seen {
            return None;
        }
        self.seen = version;
        Some(read(&self.path))
    }
}

fn version(path: &Path) -> Option<Version> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.len()))
}

#[derive(Deserialize)]
#[serde(default)]
struct Raw {
    mode: String,
    local_below_tokens: i64,
    fallback: String,
}

impl Default for Raw {
    fn default() -> Self {
        let policy = Policy::default();
        Self {
            mode: "threshold".into(),
            local_below_tokens: policy.local_below_tokens as i64,
            fallback: "local".into(),
        }
    }
}

fn read(path: &Path) -> Result<Policy, SettingsError> {
    let (raw, problems) = settings::read_file(path)?;
    check(&raw, problems)
}

/// As [`read`], from the file's text.
pub(crate) fn parse(text: &str) -> Result<Policy, SettingsError> {
    let (raw, problems) = settings::read_text(text, "policy.toml")?;
    check(&raw, problems)
}

/// Longest context of any model today.
const TOKENS_MAX: i64 = 1 << 24;

fn check(raw: &Raw, mut problems: Problems) -> Result<Policy, SettingsError> {
    let mode = match raw.mode.as_str() {
        "threshold" => Some(Mode::Threshold),
        "always-local" => Some(Mode::AlwaysLocal),
        "always-remote" => Some(Mode::AlwaysRemote),
        _ => None,
    };
    let fallback = match raw.fallback.as_str() {
        "local" => Some(Fallback::Local),
        "refuse" => Some(Fallback::Refuse),
        _ => None,
    };
    let mode_allowed = "allowed \"threshold\", \"always-local\", \"always-remote\"";
    problems.require(mode.is_some(), "mode", format!("is {:?}, {mode_allowed}", raw.mode));
    problems.range("local_below_tokens", raw.local_below_tokens, 0, TOKENS_MAX);
    let fallback_allowed = "allowed \"local\", \"refuse\"";
    problems.require(fallback.is_some(), "fallback", format!("is {:?}, {fallback_allowed}", raw.fallback));
    problems.finish()?;
    let default = Policy::default();
    Ok(Policy {
        mode: mode.unwrap_or(default.mode),
        local_below_tokens: raw.local_below_tokens as usize,
        fallback: fallback.unwrap_or(default.fallback),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Policy, String> {
        super::parse(text).map_err(|error| error.to_string())
    }

    #[test]
    fn an_empty_file_gives_the_defaults() {
        assert_eq!(parse(""), Ok(Policy::default()));
    }

    #[test]
    fn every_value_is_read() {
        let policy = parse("mode = \"always-remote\"\nlocal_below_tokens = 7\nfallback = \"refuse\"");
        let expected = Policy { mode: Mode::AlwaysRemote, local_below_tokens: 7, fallback: Fallback::Refuse };
        assert_eq!(policy, Ok(expected));
    }

    #[test]
    fn all_mistakes_are_reported_at_once() {
        let error = parse("mode = \"fast\"\nlocal_below_tokens = -1\nfallback = \"maybe\"\nmod = 1");
        assert_eq!(
            error.unwrap_err(),
            "policy.toml: unknown key `mod`; \
             `mode` is \"fast\", allowed \"threshold\", \"always-local\", \"always-remote\"; \
             `local_below_tokens` is -1, allowed 0 to 16777216; \
             `fallback` is \"maybe\", allowed \"local\", \"refuse\""
        );
    }

    #[test]
    fn a_change_is_seen_once_whether_good_or_bad() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("policy.toml");
        std::fs::write(&path, "").unwrap();
        let (mut file, policy) = PolicyFile::open(&path).unwrap();
        assert_eq!(policy, Policy::default());
        assert!(file.changed().is_none());
        std::fs::write(&path, "mode = \"always-local\"").unwrap();
        assert_eq!(file.changed().unwrap().unwrap().mode, Mode::AlwaysLocal);
        assert!(file.changed().is_none());
        std::fs::write(&path, "mode = \"broken\"").unwrap();
        assert!(file.changed().unwrap().is_err());
        assert!(file.changed().is_none());
        std::fs::remove_file(&path).unwrap();
        assert!(file.changed().unwrap().is_err());
        assert!(file.changed().is_none());
    }
}
