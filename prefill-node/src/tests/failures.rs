use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use engine::fake::{Failure, FakeModel, FakeOptions};
use engine::{
    BatchItem, BlobTemplate, EngineError, ExportedRows, InstallBlob, Model, Session, SessionConfig,
    Vocabulary,
};
use handoff::ReceiverOutcome;
use kv_block::{Fingerprint, Layout, SlotId};
use kv_transfer::{HandoffMessage, MeshAuthority, PrefillRequest, Role, Shutdown};
use tokio::sync::watch;
use tokio::time::timeout;

use super::decode_side::{Mesh, config, prompt, slow};
use crate::{NodeError, PrefillConfig, run};

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_failure_ends_one_handoff_with_its_reason_and_no_other() {
    let mesh = Mesh::start(config(), FakeOptions::default()).await;
    for failure in [Failure::Step, Failure::Export] {
        mesh.model.fail_next(failure, 1);
        let request = mesh.request(&prompt(1, 300));
        let received = mesh.open(request.clone()).await.receive(&mesh).await;
        assert!(matches!(received.outcome, ReceiverOutcome::Broken { .. }));
        let reason = received.cancel_reason.expect("a reason");
        assert!(reason.contains("code -3") || reason.contains("told to fail"), "{reason}");
        mesh.run(request).await;
    }
    mesh.idle().await;
    assert_eq!(mesh.status().handoffs_failed_total, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_out_of_turn_ends_the_handoff_and_not_the_node() {
    let mesh = Mesh::start(config(), slow()).await;
    for message in
        [HandoffMessage::Installed, HandoffMessage::Progress { computed_tokens: 1, reused_tokens: 1 }]
    {
        let mut client = mesh.open(mesh.request(&prompt(1, 2001))).await;
        client.computed(64).await;
        client.to_node.send(&message).await.unwrap();
        loop {
            if let HandoffMessage::Cancel { .. } = client.message().await {
                break;
            }
        }
        mesh.idle().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_sends_something_else_is_told_so() {
    let mesh = Mesh::start(config(), FakeOptions::default()).await;
    let mut client = mesh.open(mesh.request(&prompt(1, 100))).await;
    // A second request where a handoff message is expected.
    client.to_node.send(&mesh.request(&prompt(1, 100))).await.unwrap();
    while let Ok(Some(_)) = client.from_node.recv::<HandoffMessage>().await {}
    mesh.idle().await;
    assert_eq!(mesh.status().handoffs_completed_total, 0);
    mesh.run(mesh.request(&prompt(2, 100))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_clients_that_leave_at_any_moment_leave_nothing_behind() {
    let mesh = Mesh::start(PrefillConfig { max_resident: 2, ..config() }, slow()).await;
    for round in 0..40u32 {
        let request = mesh.request(&prompt(round, 100 + (round * 37 % 500) as usize));
        let credit_bytes = if round % 3 == 0 { 0 } else { request.credit_bytes };
        let client = mesh.open(PrefillRequest { credit_bytes, ..request }).await;
        tokio::time::sleep(Duration::from_millis(u64::from(round * 7 % 30))).await;
        client.leave();
    }
    mesh.idle().await;
    mesh.run(mesh.request(&prompt(99, 500))).await;
    mesh.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_urgent_stop_cancels_what_runs_and_ends_the_engine_thread() {
    let mut mesh = Mesh::start(config(), slow()).await;
    let mut client = mesh.open(mesh.request(&prompt(1, 4001))).await;
    client.computed(64).await;
    let ended = mesh.engine_ended.take();
    assert!(timeout(Duration::from_secs(20), mesh.node.stop_now(ended)).await.is_ok());
    loop {
        if let HandoffMessage::Cancel { .. } = client.message().await {
            break;
        }
    }
    mesh.idle().await;
}

/// Runs a node without a router; it looks for one for ever.
async fn run_node(model: Arc<dyn Model>, order: watch::Receiver<Shutdown>) -> Result<(), NodeError> {
    let credentials = MeshAuthority::generate().issue("p", Role::Prefill);
    let node = run(config(), model, credentials, order);
    timeout(Duration::from_secs(20), node).await.expect("the node ends")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_node_ends_at_once_when_told_to_drain() {
    let model = Arc::new(FakeModel::new(FakeOptions::default()).unwrap());
    let (_shutdown, order) = watch::channel(Shutdown::Draining);
    assert!(run_node(model, order).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_panics_ends_the_node_with_its_message() {
    let model = PanickingModel(FakeModel::new(FakeOptions::default()).unwrap());
    let twin = Arc::new(FakeModel::new(FakeOptions::default()).unwrap());
    let mut mesh = Mesh::start_with(config(), Arc::new(model), twin).await;
    let _client = mesh.open(mesh.request(&prompt(1, 100))).await;
    let ended = mesh.engine_ended.take().expect("an engine thread");
    let result = timeout(Duration::from_secs(20), ended).await.expect("it ends").unwrap();
    assert_eq!(result, Err("panicked: out of cheese".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_context_longer_than_the_model_is_a_clear_error() {
    let model: Arc<dyn Model> = Arc::new(FakeModel::new(FakeOptions::default()).unwrap());
    let (_shutdown, order) = watch::channel(Shutdown::Running);
    let config = PrefillConfig { context_tokens: 10_000, ..config() };
    let credentials = MeshAuthority::generate().issue("p", Role::Prefill);
    let error = run(config, model, credentials, order).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "context_tokens is 10000, allowed 0 to 8192, which the model was trained for"
    );
}

struct PanickingModel(FakeModel);

impl Model for PanickingModel {
    fn fingerprint(&self) -> Fingerprint {
        self.0.fingerprint()
    }
    fn name(&self) -> &str {
        self.0.name()
    }
    fn vocabulary(&self) -> Arc<dyn Vocabulary> {
        self.0.vocabulary()
    }
    fn context_tokens_max(&self) -> usize {
        self.0.context_tokens_max()
    }
    fn blocks_supported(&self) -> Result<(), String> {
        Ok(())
    }
    fn prefill_session(&self, config: &SessionConfig) -> Result<Box<dyn Session>, EngineError> {
        Ok(Box::new(PanickingSession(self.0.prefill_session(config)?)))
    }
    fn decode_session(&self, config: &SessionConfig) -> Result<Box<dyn Session>, EngineError> {
        self.0.decode_session(config)
    }
}

struct PanickingSession(Box<dyn Session>);

impl Session for PanickingSession {
    fn layout(&self) -> &Arc<Layout> {
        self.0.layout()
    }
    fn blob_template(&self) -> Result<Arc<BlobTemplate>, EngineError> {
        self.0.blob_template()
    }
    fn config(&self) -> &SessionConfig {
        self.0.config()
    }
    fn resident(&self, slot: SlotId) -> usize {
        self.0.resident(slot)
    }
    fn step(&mut self, _batch: &[BatchItem<'_>]) -> Result<(), EngineError> {
        panic!("out of cheese")
    }
    fn logits(&self, item: usize) -> &[f32] {
        self.0.logits(item)
    }
    fn export(&mut self, slot: SlotId, tokens: Range<usize>) -> Result<ExportedRows, EngineError> {
        self.0.export(slot, tokens)
    }
    fn install(&mut self, slot: SlotId, blob: &InstallBlob) -> Result<(), EngineError> {
        self.0.install(slot, blob)
    }
    fn truncate(&mut self, slot: SlotId, keep: usize) -> Result<(), EngineError> {
        self.0.truncate(slot, keep)
    }
    fn clear(&mut self, slot: SlotId) {
        self.0.clear(slot);
    }
}
