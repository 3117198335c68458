//! The files in `configs/` are what they say: every key, with its default.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};

use decode_node::DecodeConfig;
use prefill_node::PrefillConfig;

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs").join(name)
}

#[test]
fn decode_example_holds_the_defaults() {
    let config = DecodeConfig::read(&example("decode.toml")).unwrap();
    let default = DecodeConfig { model: config.model.clone(), ..DecodeConfig::default() };
    assert_eq!(format!("{config:?}"), format!("{default:?}"));
}

#[test]
fn prefill_example_holds_the_defaults() {
    let config = PrefillConfig::read(&example("prefill.toml")).unwrap();
    let default = PrefillConfig { model: config.model.clone(), ..PrefillConfig::default() };
    assert_eq!(format!("{config:?}"), format!("{default:?}"));
}

#[test]
fn router_example_is_accepted() {
    router::RouterConfig::read(&example("router.toml")).unwrap();
}
