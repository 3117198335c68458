//! Clients: they talk to the router as over a connection, and judge what they get.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use bytes::Bytes;
use futures_util::StreamExt;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tower_service::Service;

use crate::answer;
use crate::checker::{Checker, Ended};
use crate::mesh::Mesh;
use crate::mix::Allowed;
use crate::now;
use crate::workload::{Manner, Plan};

/// No request may take longer, whatever happens to the mesh.
pub(crate) const PATIENCE: Duration = Duration::from_secs(150);
/// Parts of a response under way, as the kernel's buffers hold some.
const PARTS_UNDER_WAY: usize = 16;
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Sends the plan's request, reads its answer and reports how it ended.
pub(crate) async fn run(
    mesh: Arc<Mesh>,
    plan: Plan,
    checker: Arc<Checker>,
    allowed: Allowed,
    patience: Duration,
) {
    for attempt in 0..=plan.retries {
        let began = now();
        let ended = match timeout(patience, ask(&mesh, &plan)).await {
            Ok(ended) => ended,
            Err(_) => Ended::Wrong(format!("no end after {} s", patience.as_secs())),
        };
        let again =
            matches!(ended, Ended::Busy(_) | Ended::Failed(_) | Ended::RouterLost) && attempt < plan.retries;
        let took = now().saturating_duration_since(began);
        checker.ended(plan.number, ended, took, allowed);
        if !again {
            return;
        }
        sleep(RETRY_AFTER).await;
    }
}

async fn ask(mesh: &Mesh, plan: &Plan) -> Ended {
    let Some(mut connection) = Connection::open(mesh, request(plan)) else { return Ended::RouterLost };
    match plan.manner {
        Manner::Leaves(after) => match timeout(after, judge(&mut connection, plan, None)).await {
            Ok(ended) => ended,
            Err(_) => judge_begun(&connection, plan),
        },
        Manner::Stalls(pause) => judge(&mut connection, plan, Some(pause)).await,
        Manner::Patient => judge(&mut connection, plan, None).await,
    }
}

fn request(plan: &Plan) -> Request<Body> {
    let mut request = Request::post(plan.path).header("content-type", "application/json");
    if let Some(arm) = plan.arm {
        request = request.header("x-segue-prefill", arm);
    }
    request.body(Body::from(plan.body.clone())).expect("the parts are valid")
}

async fn judge(connection: &mut Connection, plan: &Plan, pause: Option<Duration>) -> Ended {
    if !connection.head().await {
        return Ended::RouterLost;
    }
    if let Some(pause) = pause {
        sleep(pause).await;
    }
    if !connection.rest().await {
        return match judge_begun(connection, plan) {
            Ended::Wrong(reason) => Ended::Wrong(reason),
            _ => Ended::RouterLost,
        };
    }
    let (status, body) = (connection.status, &connection.body);
    let Some(expected) = &plan.expected else {
        return match answer::check_refusal(status, body, connection.retry_after) {
            Ok(_) if status == plan.refusal => Ended::Refused(status),
            Ok(_) => Ended::Wrong(format!("status {status} instead of {}", plan.refusal)),
            Err(reason) => Ended::Wrong(reason),
        };
    };
    if status != 200 {
        return match status {
            500..=599 => answer::check_refusal(status, body, connection.retry_after).map_or_else(
                Ended::Wrong,
                |reason| match status {
                    503 => Ended::Busy(reason),
                    _ => Ended::Failed(format!("status {status}: {reason}")),
                },
            ),
            _ => Ended::Wrong(format!("status {status}: {}", String::from_utf8_lossy(body))),
        };
    }
    let read = if plan.stream { answer::events(body, true) } else { answer::whole(body) };
    let checked = read.and_then(|read| match &read.error {
        Some(error) => read.check_begun(expected).map(|()| Ended::Failed(format!("in the stream: {error}"))),
        None => {
            let chat_stream = plan.stream && plan.path.contains("chat");
            read.check(expected, chat_stream).map(|()| Ended::Right)
        }
    });
    checked.unwrap_or_else(Ended::Wrong)
}

/// For a client that does not see the end.
fn judge_begun(connection: &Connection, plan: &Plan) -> Ended {
    let (true, Some(expected)) = (plan.stream && connection.status == 200, &plan.expected) else {
        return Ended::Left;
    };
    match answer::events(&connection.body, false).and_then(|read| read.check_begun(expected)) {
        Ok(()) => Ended::Left,
        Err(reason) => Ended::Wrong(reason),
    }
}

/// One exchange with the router. Dropping it closes the connection; the router's
/// death does so too.
pub(crate) struct Connection {
    head: Option<oneshot::Receiver<(u16, bool)>>,
    parts: mpsc::Receiver<Bytes>,
    /// 0 until it came.
    pub(crate) status: u16,
    /// Whether the head says when to come again.
    pub(crate) retry_after: bool,
    /// What came of the body.
    pub(crate) body: Vec<u8>,
    ended: oneshot::Receiver<()>,
}

impl Connection {
    /// Sends `request`; `None` if nobody listens.
    pub(crate) fn open(mesh: &Mesh, request: Request<Body>) -> Option<Self> {
        let (machine, routes) = mesh.router().routes()?;
        let (head_sender, head) = oneshot::channel();
        let (part_sender, parts) = mpsc::channel(PARTS_UNDER_WAY);
        let (end_sender, ended) = oneshot::channel();
        machine.spawn(serve(routes, request, head_sender, part_sender, end_sender));
        Some(Self { head: Some(head), parts, status: 0, retry_after: false, body: Vec::new(), ended })
    }

    /// Waits for the status; false if it never comes.
    pub(crate) async fn head(&mut self) -> bool {
        if let Some(head) = &mut self.head {
            match head.await {
                Ok((status, retry_after)) => (self.status, self.retry_after) = (status, retry_after),
                Err(_) => return false,
            }
            self.head = None;
        }
        true
    }

    /// Reads the body to its end; false if it breaks off.
    pub(crate) async fn rest(&mut self) -> bool {
        while let Some(part) = self.parts.recv().await {
            self.body.extend_from_slice(&part);
        }
        (&mut self.ended).await.is_ok()
    }
}

/// The server's side: as soon as the client is gone, so is the work for it.
async fn serve(
    mut routes: axum::Router,
    request: Request<Body>,
    head: oneshot::Sender<(u16, bool)>,
    parts: mpsc::Sender<Bytes>,
    ended: oneshot::Sender<()>,
) {
    let work = async {
        let Ok(response) = Service::<Request<Body>>::call(&mut routes, request).await;
        let _ = head.send((response.status().as_u16(), response.headers().contains_key("retry-after")));
        let mut body = response.into_body().into_data_stream();
        while let Some(part) = body.next().await {
            let Ok(part) = part else { return };
            if parts.send(part).await.is_err() {
                return;
            }
        }
        let _ = ended.send(());
    };
    tokio::select! {
        biased;
        () = work => {}
        () = parts.closed() => {}
    }
}
