//! Mesh certificates: one authority, one certificate per node, roles inside.
//!
//! A certificate's subject is the node's name, its one alternative name is its
//! role: `router.segue`, `prefill.segue` or `decode.segue`. A client asks TLS
//! for the role it wants to talk to; a server reads role and name of its client
//! from the certificate that TLS has verified.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::extensions::GeneralName;
use x509_parser::x509::{AttributeTypeAndValue, X509Name};

use crate::{TransferError, tls};

/// What a certificate allows its holder to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Places requests.
    Router,
    /// Computes prompts.
    Prefill,
    /// Runs sequences.
    Decode,
}

impl Role {
    const ALL: [Self; 3] = [Self::Router, Self::Prefill, Self::Decode];

    /// The word used in `Hello`, configurations and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// The name that a certificate of this role carries.
    pub(crate) fn server_name(self) -> &'static str {
        match self {
            Self::Router => "router.segue",
            Self::Prefill => "prefill.segue",
            Self::Decode => "decode.segue",
        }
    }

    fn from_server_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.server_name() == name)
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The mesh CA with its private key.
pub struct MeshAuthority {
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl MeshAuthority {
    /// A new authority with a fresh key.
    pub fn generate() -> Self {
        let key = fresh_key();
        // Two authorities of one name would be told apart by signature only, and
        // the error would speak of a bad signature instead of an unknown issuer.
        let id = blake3::hash(key.public_key_raw()).to_hex();
        let mut params = params(&format!("segue mesh authority {}", &id[..16]));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).expect("own parameters are valid");
        Self { certificate_pem: certificate.pem(), issuer: Issuer::new(params, key) }
    }

    /// Reads `ca.pem` and `ca.key` from `dir`.
    pub fn load(dir: &Path) -> Result<Self, TransferError> {
        let certificate_path = dir.join("ca.pem");
        let key_path = dir.join("ca.key");
        Self::parse(read(&certificate_path)?, &read(&key_path)?, &certificate_path, &key_path)
    }

    /// The paths are for errors.
    pub(crate) fn parse(
        certificate_pem: String,
        key_pem: &str,
        certificate_path: &Path,
        key_path: &Path,
    ) -> Result<Self, TransferError> {
        let key = KeyPair::from_pem(key_pem).map_err(|error| unusable(key_path, error))?;
        let issuer = parse_certificate(&certificate_pem)
            .and_then(|certificate| issuer_of(&certificate, key))
            .map_err(|reason| unusable(certificate_path, reason))?;
        let authority = Self { certificate_pem, issuer };
        // A key of another authority would sign certificates that nobody accepts.
        let issued = authority.try_issue("check", Role::Router).map_err(|error| unusable(key_path, error))?;
        issued.check(certificate_path, key_path, key_path)?;
        Ok(authority)
    }

    /// Writes `ca.pem` and `ca.key` (mode 0600) into `dir`.
    pub fn save(&self, dir: &Path) -> Result<(), TransferError> {
        write(&dir.join("ca.pem"), &self.certificate_pem, 0o644)?;
        write(&dir.join("ca.key"), &self.issuer.key().serialize_pem(), 0o600)
    }

    /// Credentials for one node.
    ///
    /// A name that [`check_node_name`] refuses gives credentials that can
    /// neither be saved nor used.
    pub fn issue(&self, name: &str, role: Role) -> Credentials {
        self.try_issue(name, role).expect("this authority has issued before")
    }

    fn try_issue(&self, name: &str, role: Role) -> Result<Credentials, rcgen::Error> {
        let key = fresh_key();
        let mut params = params(name);
        let server_name = role.server_name().try_into().expect("role names are ASCII");
        params.subject_alt_names = vec![rcgen::SanType::DnsName(server_name)];
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(Credentials {
            pem: Arc::new(Pem {
                authority: self.certificate_pem.clone(),
                certificate: certificate.pem(),
                key: key.serialize_pem(),
            }),
        })
    }
}

/// A node's certificate and key, and the authority it trusts.
#[derive(Clone)]
pub struct Credentials {
    pub(crate) pem: Arc<Pem>,
}

pub(crate) struct Pem {
    pub(crate) authority: String,
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Credentials {
    /// Reads `ca.pem`, `NAME.pem` and `NAME.key` from `dir`. Errors name the file:
    /// also one whose certificate is for another name or role, with which no
    /// peer would ever talk.
    pub fn load(dir: &Path, name: &str, role: Role) -> Result<Self, TransferError> {
        check_node_name(name).map_err(|reason| unusable(&dir.join(name), reason))?;
        let certificate_path = dir.join(format!("{name}.pem"));
        let key_path = dir.join(format!("{name}.key"));
        let pem = Pem {
            authority: read(&dir.join("ca.pem"))?,
            certificate: read(&certificate_path)?,
            key: read(&key_path)?,
        };
        let credentials = Self { pem: Arc::new(pem) };
        credentials.check(&dir.join("ca.pem"), &certificate_path, &key_path)?;
        let (certified, certified_role) = credentials.identity()?;
        if (certified.as_str(), certified_role) != (name, role) {
            let reason = format!("is for the {certified_role} {certified:?}, not for the {role} {name:?}");
            return Err(unusable(&certificate_path, reason));
        }
        Ok(credentials)
    }

    /// Writes `ca.pem`, `NAME.pem` and `NAME.key` (mode 0600) into `dir`.
    pub fn save(&self, dir: &Path, name: &str) -> Result<(), TransferError> {
        check_node_name(name).map_err(|reason| unusable(&dir.join(name), reason))?;
        write(&dir.join("ca.pem"), &self.pem.authority, 0o644)?;
        write(&dir.join(format!("{name}.pem")), &self.pem.certificate, 0o644)?;
        write(&dir.join(format!("{name}.key")), &self.pem.key, 0o600)
    }

    /// Name and role that the certificate gives its holder.
    pub fn identity(&self) -> Result<(String, Role), TransferError> {
        let parsed = self.certificate().and_then(|certificate| identity_of(&certificate));
        parsed.map_err(|reason| TransferError::Credentials { path: "certificate".into(), reason })
    }

    pub(crate) fn authority(&self) -> Result<CertificateDer<'static>, String> {
        parse_certificate(&self.pem.authority)
    }

    pub(crate) fn certificate(&self) -> Result<CertificateDer<'static>, String> {
        parse_certificate(&self.pem.certificate)
    }

    pub(crate) fn key(&self) -> Result<PrivateKeyDer<'static>, String> {
        PrivateKeyDer::from_pem_slice(self.pem.key.as_bytes())
            .map_err(|_| "holds no usable PEM private key".to_owned())
    }

    /// Finds at start what would otherwise be a refused handshake later.
    pub(crate) fn check(
        &self,
        authority_path: &Path,
        certificate_path: &Path,
        key_path: &Path,
    ) -> Result<(), TransferError> {
        self.authority().map_err(|reason| unusable(authority_path, reason))?;
        let certificate = self.certificate().map_err(|reason| unusable(certificate_path, reason))?;
        identity_of(&certificate).map_err(|reason| unusable(certificate_path, reason))?;
        self.key().map_err(|reason| unusable(key_path, reason))?;
        tls::check_signature(self).map_err(|reason| unusable(certificate_path, reason))?;
        tls::client_config(self).map(drop).map_err(|reason| unusable(key_path, reason))
    }
}

/// Whether `name` may name a node: it becomes a file name, a log field and a
/// header value.
pub fn check_node_name(name: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.starts_with('.') || !name.chars().all(allowed) {
        return Err(format!(
            "node name {name:?} must have 1 to {NAME_BYTES_MAX} letters, digits, '-', '_' or '.', \
             and not begin with '.'"
        ));
    }
    if name == "ca" {
        return Err("node name \"ca\" is taken by the authority's own files".to_owned());
    }
    Ok(())
}

/// As long as a DNS label: no name in use is longer.
const NAME_BYTES_MAX: usize = 63;

/// Name and role in a certificate whose signature TLS has verified.
pub(crate) fn identity_of(certificate: &CertificateDer<'_>) -> Result<(String, Role), String> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate)
        .map_err(|error| format!("is not a certificate: {error}"))?;
    let name = parsed.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
    let name = name.ok_or("has no node name")?.to_owned();
    check_node_name(&name)?;
    let names = parsed.subject_alternative_name().ok().flatten();
    let role = names.iter().flat_map(|names| &names.value.general_names).find_map(|name| match name {
        GeneralName::DNSName(name) => Role::from_server_name(name),
        _ => None,
    });
    Ok((name, role.ok_or("carries no role of the mesh")?))
}

fn parse_certificate(pem: &str) -> Result<CertificateDer<'static>, String> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|_| "holds no usable PEM certificate".to_owned())
}

/// The authority that signs with `key` under the subject of `certificate`.
fn issuer_of(certificate: &CertificateDer<'_>, key: KeyPair) -> Result<Issuer<'static, KeyPair>, String> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate)
        .map_err(|error| format!("is not a certificate: {error}"))?;
    check_subject(parsed.subject())?;
    Issuer::from_ca_cert_der(certificate, key).map_err(|error| error.to_string())
}

/// Whether rcgen can write the subject again: it panics where it cannot.
fn check_subject(subject: &X509Name<'_>) -> Result<(), String> {
    // The first number of an object identifier is 0, 1 or 2.
    let first =
        |attribute: &AttributeTypeAndValue<'_>| attribute.attr_type().iter().and_then(|mut n| n.next());
    match subject.iter_attributes().find(|attribute| first(attribute).is_none_or(|number| number > 2)) {
        Some(_) => Err("has a subject with an attribute of no known kind".to_owned()),
        None => Ok(()),
    }
}

fn fresh_key() -> KeyPair {
    KeyPair::generate().expect("the system gives random bytes")
}

fn params(common_name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, common_name);
    let now = now();
    params.not_before = (now - CLOCK_SLACK).into();
    params.not_after = (now + VALIDITY).into();
    params
}

/// Clocks of machines without network time differ by hours.
const CLOCK_SLACK: Duration = Duration::from_secs(24 * 3600);
/// Ten years: longer than the machines live, since nothing renews certificates.
const VALIDITY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

#[expect(clippy::disallowed_methods, reason = "a certificate begins when it is made")]
fn now() -> SystemTime {
    SystemTime::now()
}

fn read(path: &Path) -> Result<String, TransferError> {
    fs::read_to_string(path).map_err(|error| unusable(path, error))
}

fn write(path: &Path, text: &str, mode: u32) -> Result<(), TransferError> {
    let write = || {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        // An old file would keep its old mode.
        match fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?.write_all(text.as_bytes())
    };
    write().map_err(|error| unusable(path, error))
}

fn unusable(path: &Path, reason: impl std::fmt::Display) -> TransferError {
    TransferError::Credentials { path: path.display().to_string(), reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use x509_parser::prelude::FromDer;

    use super::*;

    #[test]
    fn an_authority_whose_subject_cannot_be_written_again_is_refused() {
        let refused = |der: &[u8]| {
            let (_, subject) = X509Name::from_der(der).unwrap();
            check_subject(&subject).err()
        };
        let named = |kind: u8| [0x30, 12, 0x31, 10, 0x30, 8, 0x06, 3, kind, 4, 3, 0x0c, 1, b'x'];
        assert_eq!(refused(&named(0x55)), None);
        let unknown = "has a subject with an attribute of no known kind";
        assert_eq!(refused(&named(0x79)).as_deref(), Some(unknown));
    }
}
