//! The official OpenAI Python client.

use std::process::Command;

use crate::harness;

#[tokio::test]
async fn openai_python_client_is_served() {
    let Some(python) = std::env::var_os("SEGUE_OPENAI_PYTHON") else {
        eprintln!(
            "SKIPPED: SEGUE_OPENAI_PYTHON names no Python with the `openai` package; `make test` sets it"
        );
        return;
    };
    let (turn, _) = harness::shared().await;
    let url = turn.as_ref().unwrap().url();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/openai_client_test.py");
    let output = Command::new(python).args([script, "--url", url]).output().unwrap();
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
